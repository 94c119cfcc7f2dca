#include "lockstep/nn/detail/checkpoint_core.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/nn/checkpoint.h"
#include "lockstep/nn/internal/forward_state.h"
#include "lockstep/tensor/detail/saved_tensor_scope.h"

namespace lockstep::internal {
namespace {

// Ends the second run of a region. Not a std::exception, so that fewer handlers in the user's function catch
// it.
struct EnoughRecomputed {
  const void* frame;
};

}  // namespace

// One checkpointed region: for every tensor that its forward pass saved a slot, numbered in that order. Owned
// by the hooks in the graph, so it is destroyed when backward has released the last of them.
class CheckpointRecording::Frame final : public std::enable_shared_from_this<Frame> {
 public:
  Frame(const Checkpoint& options, const std::vector<at::Tensor>& inputs, Again again)
      : options_(options),
        state_(ForwardState::now(inputs, options.preserve_rng_state)),
        again_(std::move(again)) {
    // Saved as autograd saves: a change in place is detected, and a region around this one does not keep
    // them either.
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  void forward_is_over() { forward_is_over_ = true; }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_slot() {
    return std::make_unique<Kept>(shared_from_this());
  }

 private:
  // What is known of a saved tensor without keeping it.
  struct Shape {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;

    static Shape of(const at::Tensor& tensor) {
      return {tensor.sizes().vec(), tensor.scalar_type(), tensor.device()};
    }
    bool operator==(const Shape&) const = default;
    std::string text() const { return base::cat(dtype, at::IntArrayRef(sizes), " on ", device); }
  };
  struct Slot {
    Shape shape;
    bool wanted = true;
    at::Tensor value{};  // between the second run and the node that needs it
  };

  // Stands for a tensor of the first run.
  class Kept final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Kept(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
    ~Kept() override {
      if (slot_) frame_->forget(*slot_);
    }
    void call_pack_hook(const at::Tensor& tensor) override { slot_ = frame_->add(tensor); }
    at::Tensor call_unpack_hook() override { return frame_->fetch(*slot_); }

   private:
    const std::shared_ptr<Frame> frame_;
    std::optional<std::size_t> slot_;
  };

  // Holds a tensor of the second run, for a function that itself calls backward.
  class Repeated final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Repeated(Frame& frame) : frame_(frame) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.detach();  // what a node gave out refers to the node, which refers to this
      frame_.offer(tensor_);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Frame& frame_;
    at::Tensor tensor_;
  };

  std::size_t add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    slots_.push_back({Shape::of(tensor)});
    return slots_.size() - 1;
  }

  void forget(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].wanted = false;
    slots_[slot].value.reset();
  }

  at::Tensor fetch(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    // Left over from another backward pass over a retained graph: the parameters may have changed since.
    if (const int task = torch::autograd::get_current_graph_task_id(); task != task_) {
      task_ = task;
      for (Slot& other : slots_) other.value.reset();
    }
    if (!slots_[slot].value.defined()) run_again();
    return std::exchange(slots_[slot].value, {});
  }

  void run_again() {
    std::vector<at::Tensor> inputs;
    for (const auto& input : inputs_) inputs.push_back(input.unpack());
    n_offered_ = 0;
    difference_.clear();
    {
      const ForwardState::Restored as_then(state_);
      const at::AutoGradMode with_graph(true);
      const SavedTensorScope scope([this] { return std::make_unique<Repeated>(*this); });
      try {
        again_(inputs);
      } catch (const EnoughRecomputed& enough) {
        if (enough.frame != this) throw;
      }
    }
    if (n_offered_ != slots_.size() && (forward_is_over_ || n_offered_ < slots_.size())) {
      base::raise(ErrorKind::kUsage, base::cat("checkpoint: the second run of the function saved ",
                                               n_offered_, " tensors for backward, the first ", slots_.size(),
                                               "; it must do the same each time"));
    }
    if (!difference_.empty()) {
      base::raise(ErrorKind::kUsage,
                  base::cat("checkpoint: ", difference_, "; the function must compute the same each time"));
    }
  }

  void offer(const at::Tensor& tensor) {
    const std::size_t place = n_offered_++;
    if (place >= slots_.size()) return;  // said after the run
    Slot& slot = slots_[place];
    const Shape shape = Shape::of(tensor);
    if (options_.determinism_check && slot.wanted && difference_.empty() && shape != slot.shape) {
      difference_ = base::cat("tensor ", place, " that the function saves for backward was ",
                              slot.shape.text(), " in the first run and is ", shape.text(), " in the second");
    }
    if (slot.wanted) slot.value = tensor;
    if (options_.early_stop && n_offered_ == slots_.size()) throw EnoughRecomputed{this};
  }

  const Checkpoint options_;
  const ForwardState state_;
  const Again again_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  // Held through the second run: nodes on several threads may want tensors of one region, and a function that
  // calls backward itself comes here again.
  std::recursive_mutex mutex_;
  std::vector<Slot> slots_;
  bool forward_is_over_ = false;
  int task_ = -1;
  std::size_t n_offered_ = 0;
  std::string difference_;
};

CheckpointRecording::CheckpointRecording(const Checkpoint& options, const std::vector<at::Tensor>& inputs,
                                         Again again)
    : frame_(std::make_shared<Frame>(options, inputs, std::move(again))),
      scope_(std::make_unique<SavedTensorScope>([frame = frame_.get()] { return frame->make_slot(); })) {}

CheckpointRecording::~CheckpointRecording() {
  frame_->forward_is_over();
}

}  // namespace lockstep::internal
