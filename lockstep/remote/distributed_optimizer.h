// An optimizer over parameters on several workers: each owner updates its own, with the gradients of an
// autograd context.
//
//   rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
//                                                          rpc::Args{torch::optim::SGDOptions(0.05)});
//   {
//     autograd::DistAutogradContext context;
//     autograd::backward(context, {loss});
//     optimizer.step(context);
//   }
//
// `parameters` are RRefs, of RemoteModule::remote_parameters or RRef<at::Tensor>(weight) for this worker's
// own. Optimizers: torch::optim's SGD, Adam, AdamW, Adagrad and RMSprop, the functional ones of
// lockstep/optim, and your own classes:
//
//   // Mine(std::vector<at::Tensor>, double, bool), a torch::optim::Optimizer or a FunctionalOptimizer; once,
//   // in a source file that all programs contain
//   LOCKSTEP_RPC_OPTIMIZER(Mine, double, bool);
//
// Gradients come from the context; Tensor::grad() is as before after a step. Sparse gradients work where the
// optimizer supports them (SGD without momentum, Adagrad). Steps on one worker run one at a time. Steps of
// several callers are not ordered: a pass of one may see parameters before or after a step of another, or
// some of each.
// Thread safety: every method may be called from any thread. A value: copies refer to the same optimizers,
// which are destroyed with the last copy.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/autograd/autograd.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/optim/functional_optimizer.h"
#include "lockstep/remote/detail/optimizer_options.h"
#include "lockstep/rpc/remote.h"

namespace lockstep::rpc {

// One owner's part.
class LocalOptimizer {
 public:
  // gradients[i] is for parameters[i], undefined when the context has none.
  using Step = std::function<void(const std::vector<at::Tensor>& gradients)>;
  LocalOptimizer(std::vector<at::Tensor> parameters, Step step)
      : parameters_(std::move(parameters)), step_(std::move(step)) {}
  // Raises kUsage for a context that this worker does not know.
  void step(const autograd::Context& context);

 private:
  std::vector<at::Tensor> parameters_;
  Step step_;
};

namespace internal {

// Steps with these gradients in place of Tensor::grad().
void step_with(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters,
               const std::vector<at::Tensor>& gradients);
// Raises kUsage when this worker does not own one of them.
std::vector<at::Tensor> owned(const std::vector<RRef<at::Tensor>>& parameters);

template <class Optimizer>
std::string optimizer_function() {
  return std::string("lockstep.optimizer ") + typeid(Optimizer).name();
}

template <class Optimizer, class... A>
LocalOptimizer make_local(const std::vector<RRef<at::Tensor>>& list, const OnWire<A>&... arguments) {
  const auto parameters = owned(list);
  const auto optimizer = std::make_shared<Optimizer>(parameters, from_wire<A>(arguments)...);
  if constexpr (std::is_base_of_v<FunctionalOptimizer, Optimizer>) {
    return {parameters, [optimizer](const auto& gradients) { optimizer->step(gradients); }};
  } else {
    return {parameters,
            [optimizer, parameters](const auto& gradients) { step_with(*optimizer, parameters, gradients); }};
  }
}

// For each owner its parameters, in the order given. Raises kUsage for none, or an empty RRef.
std::map<WorkerId, std::vector<RRef<at::Tensor>>> by_owner(const std::vector<RRef<at::Tensor>>& parameters);
void await_all(const std::vector<RRef<LocalOptimizer>>& optimizers);
void step_all(const std::vector<RRef<LocalOptimizer>>& optimizers, const autograd::Context& context,
              CallOptions options);

// Registers once; always true.
bool register_optimizers();

}  // namespace internal

template <class Optimizer, class... A>
bool register_optimizer() {
  return register_function(internal::optimizer_function<Optimizer>(), &internal::make_local<Optimizer, A...>);
}
#define LOCKSTEP_RPC_OPTIMIZER(...)                                                  \
  [[maybe_unused]] static const bool LOCKSTEP_RPC_JOIN(lockstep_rpc_, __COUNTER__) = \
      ::lockstep::rpc::register_optimizer<__VA_ARGS__>()

template <class Optimizer>
class DistributedOptimizer {
 public:
  // Blocks until every owner has constructed its Optimizer(its parameters, arguments...); the options are
  // those of the calls. Raises kUsage for no parameters, and what a constructor threw.
  template <class... A>
  explicit DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters,
                                const Args<A...>& arguments = {}, CallOptions options = {}) {
    using Make = LocalOptimizer(std::vector<RRef<at::Tensor>>, internal::OnWire<A>...);
    for (const auto& owned : internal::by_owner(parameters)) {
      const auto make = [&](const A&... values) {
        return remote(int{owned.first}, function<Make>(internal::optimizer_function<Optimizer>()),
                      {owned.second, internal::to_wire(values)...}, options);
      };
      optimizers_.push_back(std::apply(make, arguments.values));
    }
    internal::await_all(optimizers_);
  }

  // Every owner steps; blocks until all have, then raises the first error, in the order of the owners. kUsage
  // for a context that an owner does not know.
  void step(const autograd::Context& context, CallOptions options = {}) const {
    internal::step_all(optimizers_, context, options);
  }
  // One for each owner.
  const std::vector<RRef<LocalOptimizer>>& remote_optimizers() const { return optimizers_; }

 private:
  std::vector<RRef<LocalOptimizer>> optimizers_;
};

}  // namespace lockstep::rpc
