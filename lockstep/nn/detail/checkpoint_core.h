// The part of checkpointing that does not depend on the types of its function. Used through checkpoint.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

struct Checkpoint;

namespace internal {

class SavedTensorScope;

// For its lifetime, tensors that autograd saves on this thread are not kept. `again` recomputes the region
// from its inputs.
class CheckpointRecording final {
 public:
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointRecording(const Checkpoint& options, const std::vector<at::Tensor>& inputs, Again again);
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
std::vector<at::Tensor> checkpoint_reentrant(const Checkpoint& options, const std::vector<at::Tensor>& inputs,
                                             const CheckpointRun& first, CheckpointRun again);

}  // namespace internal
}  // namespace lockstep
