// The part of checkpoint() that does not depend on the types of its function. Used through checkpoint.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

struct CheckpointOptions {
  // False: the graph is kept without its saved tensors. True: no graph, and a nested backward pass inside
  // backward().
  bool use_reentrant = false;
  // The recomputation draws the same random numbers; the generators are restored afterwards.
  bool preserve_rng_state = true;
  // Compare sizes, type and device of the tensors that both runs save.
  bool determinism_check = true;
  // Stop the recomputation once it has saved everything backward needs, by an exception that `fn` must not
  // catch.
  bool early_stop = true;
};

namespace internal {

class SavedTensorScope;

// For its lifetime, tensors that autograd saves on this thread are not kept. `again` recomputes the region
// from its inputs.
class CheckpointRecording final {
 public:
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointRecording(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, Again again);
  ~CheckpointRecording();
  CheckpointRecording(const CheckpointRecording&) = delete;
  CheckpointRecording& operator=(const CheckpointRecording&) = delete;

 private:
  class Frame;
  const std::shared_ptr<Frame> frame_;
  const std::unique_ptr<SavedTensorScope> scope_;
};

// Returns the results of `first`, which is called immediately and without gradients; backward() calls
// `again`. Both return the defined tensors.
using CheckpointRun = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
std::vector<at::Tensor> checkpoint_reentrant(const CheckpointOptions& options,
                                             const std::vector<at::Tensor>& inputs,
                                             const CheckpointRun& first, CheckpointRun again);

}  // namespace internal
}  // namespace lockstep
