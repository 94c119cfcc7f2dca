#include "lockstep/remote/distributed_optimizer.h"
#include "lockstep/base/detail/raise.h"

#include <mutex>

namespace lockstep::rpc {
namespace {

// One step at a time: a step of torch::optim reads Tensor::grad(), which Swapped replaces, and two optimizers
// may have parameters in common. Workers that are threads of one process share the mutex, and wait for each
// other's steps needlessly.
std::mutex& step_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Tensor::grad() of the parameters is `gradients` while it lives. Also restored when the step throws.
// `parameters` must outlive it.
class Swapped {
 public:
  Swapped(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients)
      : parameters_(parameters) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      before_.push_back(parameters[i].grad());
      parameters[i].mutable_grad() = gradients[i];
    }
  }
  ~Swapped() {
    for (std::size_t i = 0; i < before_.size(); ++i) parameters_[i].mutable_grad() = std::move(before_[i]);
  }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> before_;
};

}  // namespace

void LocalOptimizer::step(const autograd::Context& context) {
  // Outside of the lock: the lookup in the context needs none, and raises for a context that this worker does
  // not know.
  const auto all = context.gradients();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) gradients.push_back(all.find(parameter));
  const std::lock_guard lock(step_mutex());
  step_(gradients);
}
LOCKSTEP_RPC_METHOD(&LocalOptimizer::step, "lockstep.LocalOptimizer.step");

namespace internal {

void step_with(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters,
               const std::vector<at::Tensor>& gradients) {
  const Swapped swapped(parameters, gradients);
  optimizer.step();
}

std::vector<at::Tensor> owned(const std::vector<RRef<at::Tensor>>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.local_value());
  return tensors;
}

std::map<WorkerId, std::vector<RRef<at::Tensor>>> by_owner(const std::vector<RRef<at::Tensor>>& parameters) {
  if (parameters.empty()) base::raise(ErrorKind::kUsage, "DistributedOptimizer: there are no parameters");
  std::map<WorkerId, std::vector<RRef<at::Tensor>>> owners;
  for (const auto& parameter : parameters) {
    if (!parameter.valid())
      base::raise(ErrorKind::kUsage, "DistributedOptimizer: a parameter's RRef is empty");
    // Everything is checked before the caller starts a remote constructor. Ordered by worker id, which is the
    // order in which errors of several owners are reported.
    owners[parameter.owner().id].push_back(parameter);
  }
  return owners;
}

void await_all(const std::vector<RRef<LocalOptimizer>>& optimizers) {
  // All owners construct at the same time. When one fails, the RRefs of the others are destroyed with the
  // caller's list, and their owners destroy what they made.
  std::vector<Future<void>> made;
  for (const auto& optimizer : optimizers) made.push_back(optimizer.get_future());
  wait_all(made);
}

void step_all(const std::vector<RRef<LocalOptimizer>>& optimizers, const autograd::Context& context,
              CallOptions options) {
  // All are started before one is waited for, and all are waited for before an error is raised: no step still
  // runs when the caller sees the failure of another one.
  std::vector<Future<void>> steps;
  for (const auto& optimizer : optimizers)
    steps.push_back(optimizer.rpc_async(&LocalOptimizer::step, {context}, options));
  wait_all(steps);
}

bool register_optimizers() {
  using namespace torch::optim;
  // Each class with the types of its constructor's further arguments, which a caller's Args must have.
  static const bool registered =
      register_optimizer<SGD, SGDOptions>() && register_optimizer<Adam, AdamOptions>() &&
      register_optimizer<AdamW, AdamWOptions>() && register_optimizer<Adagrad, AdagradOptions>() &&
      register_optimizer<RMSprop, RMSpropOptions>() && register_optimizer<FunctionalSGD, SGDOptions>() &&
      register_optimizer<FunctionalAdam, AdamOptions>() &&
      register_optimizer<FunctionalAdamW, AdamWOptions>() &&
      register_optimizer<FunctionalAdagrad, AdagradOptions>() &&
      register_optimizer<FunctionalRMSprop, RMSpropOptions>() &&
      register_optimizer<FunctionalAdadelta, AdadeltaOptions>() &&
      register_optimizer<FunctionalRprop, RpropOptions>() &&
      register_optimizer<FunctionalAdamax, AdamaxOptions>();
  return registered;
}

}  // namespace internal
}  // namespace lockstep::rpc
