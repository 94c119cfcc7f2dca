#include "lockstep/optim/internal/local_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

using torch::optim::OptimizerParamState;

template <class State, class... Getters>
bool take(OptimizerParamState& state, std::vector<at::Tensor*>& tensors, Getters... getters) {
  auto* const known = dynamic_cast<State*>(&state);
  if (known == nullptr) return false;
  (tensors.push_back(&getters(*known)), ...);
  return true;
}

// libtorch's states have no common way to name their tensors.
std::vector<at::Tensor*> tensors_of(OptimizerParamState& state) {
  using namespace torch::optim;
  std::vector<at::Tensor*> tensors;
  const auto moments = [&]<class State>(std::type_identity<State>) {
    return take<State>(
        state, tensors, [](State& s) -> at::Tensor& { return s.exp_avg(); },
        [](State& s) -> at::Tensor& { return s.exp_avg_sq(); },
        [](State& s) -> at::Tensor& { return s.max_exp_avg_sq(); });
  };
  const bool known =
      take<SGDParamState>(state, tensors, [](auto& s) -> at::Tensor& { return s.momentum_buffer(); }) ||
      moments(std::type_identity<AdamParamState>{}) || moments(std::type_identity<AdamWParamState>{}) ||
      take<AdagradParamState>(state, tensors, [](auto& s) -> at::Tensor& { return s.sum(); }) ||
      take<RMSpropParamState>(
          state, tensors, [](auto& s) -> at::Tensor& { return s.square_avg(); },
          [](auto& s) -> at::Tensor& { return s.momentum_buffer(); },
          [](auto& s) -> at::Tensor& { return s.grad_avg(); });
  if (!known) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("the state of this optimizer (", typeid(state).name(),
                          ") cannot be read where parameters are sharded; SGD, Adam, AdamW, Adagrad and "
                          "RMSprop can"));
  }
  return tensors;
}

// Calls visit(parameter, tensor) for the state tensors of sharded parameters.
template <class Visit>
void for_each_sharded(const torch::optim::Optimizer& optimizer, Visit visit) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!has_shards(parameter)) continue;
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      for (at::Tensor* tensor : tensors_of(*found->second)) {
        if (tensor->defined()) visit(parameter, *tensor);
      }
    }
  }
}

}  // namespace

LocalState::LocalState(const torch::optim::Optimizer& optimizer) {
  for_each_sharded(optimizer, [&](const at::Tensor&, at::Tensor& tensor) {
    if (!has_shards(tensor)) return;
    whole_.emplace_back(&tensor, tensor);
    tensor = local_shard(tensor);
  });
}

LocalState::~LocalState() {
  for (auto& [tensor, whole] : whole_) *tensor = std::move(whole);
}

void shard_loaded_state(torch::optim::Optimizer& optimizer) {
  for_each_sharded(optimizer, [](const at::Tensor& parameter, at::Tensor& tensor) {
    const at::Tensor piece = local_shard(parameter);
    if (has_shards(tensor)) return;
    if (tensor.sizes() != piece.sizes()) {
      base::raise(ErrorKind::kUsage,
                  base::cat("loading an optimizer's state: a tensor of sizes ", tensor.sizes(),
                            " belongs to a sharded parameter, of which this rank holds ", piece.sizes(),
                            "; every rank loads the state that it saved"));
    }
    tensor = gradient_of_shard(parameter, tensor);
  });
}

}  // namespace lockstep::internal
