// The part of checkpoint() that does not depend on the types of its function. Users meet it through checkpoint.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

struct CheckpointOptions {
  // False: the graph stays, its values do not. True: no graph, and a backward pass of its own inside backward().
  bool use_reentrant = false;
  // The second run draws the same random numbers; the generators then go on from where they were.
  bool preserve_rng_state = true;
  // Compare sizes, type and device of what the second run saves with what the first did.
  bool determinism_check = true;
  // End the second run as soon as it has saved everything backward needs, by an exception that `fn` must let pass.
  bool early_stop = true;
};

namespace internal {

class SavedTensorScope;

// While it lives, what autograd saves on this thread is not kept. `again` runs the region a second time on the inputs it
// is given.
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

// The results of `first`, which is called at once and without gradients; `again` is what backward() calls. Both give the
// tensors that are defined.
using CheckpointRun = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
std::vector<at::Tensor> checkpoint_reentrant(const CheckpointOptions& options,
                                             const std::vector<at::Tensor>& inputs,
                                             const CheckpointRun& first, CheckpointRun again);

}  // namespace internal
}  // namespace lockstep
