// The state of an optimizer whose parameters are sharded, as plain tensors: archives hold memory, which a
// sharded tensor has none of. Every rank sees the pieces that it holds. Knows the optimizers of libtorch that
// keep tensors of the parameters' sizes; kUnsupported for others, where a parameter is sharded.
// Thread safety: as the optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace lockstep::internal {

// While it lives, the sharded tensors in the optimizer's state are replaced by this rank's pieces.
class LocalState {
 public:
  explicit LocalState(const torch::optim::Optimizer& optimizer);
  ~LocalState();
  LocalState(const LocalState&) = delete;
  LocalState& operator=(const LocalState&) = delete;

 private:
  std::vector<std::pair<at::Tensor*, at::Tensor>> whole_;
};

// The other way, permanently: plain tensors in the state of sharded parameters, just loaded, become pieces.
void shard_loaded_state(torch::optim::Optimizer& optimizer);

}  // namespace lockstep::internal
