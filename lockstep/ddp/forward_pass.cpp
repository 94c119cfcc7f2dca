#include "lockstep/ddp/detail/forward_pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "lockstep/ddp/internal/reducer.h"

namespace lockstep {

// Costs one flag test when no profiler is active.
class ForwardPass::Range {
 public:
  static std::unique_ptr<Range> begin() {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    return callbacks ? std::unique_ptr<Range>(new Range(std::move(*callbacks))) : nullptr;
  }

 private:
  explicit Range(at::StepCallbacks&& callbacks) : record_(std::move(callbacks)) {
    record_.before("DistributedDataParallel.forward");
  }
  at::RecordFunction record_;
};

ForwardPass::ForwardPass(DdpCore& core) : core_(core), range_(Range::begin()) {
  core_.before_forward();
  if (!core_.options_.device_ids.empty())
    input_device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(core_.options_.device_ids.front()));
  if (!core_.precisions_) return;
  const MixedPrecision& mixed = *core_.options_.mixed_precision;
  if (mixed.cast_forward_inputs) input_dtype_ = mixed.param_dtype;
  shortened_ = core_.precisions_->shorten();
  if (shortened_ && at::GradMode::is_enabled()) core_.reducer_->renew_hooks();
}

ForwardPass::~ForwardPass() {
  if (shortened_) core_.precisions_->restore();
}

void ForwardPass::change_input(at::Tensor& tensor) const {
  if (!tensor.defined()) return;
  // In the current stream, where the module reads it: no other stream has to be waited for.
  if (input_device_ && tensor.device() != *input_device_)
    tensor = tensor.to(*input_device_, /*non_blocking=*/true);
  if (input_dtype_ && tensor.is_floating_point()) tensor = tensor.to(*input_dtype_);
}

void ForwardPass::finish(const std::function<void(const DdpCore::Visitor&)>& visit_outputs) {
  core_.after_forward(visit_outputs);
  // From now on the graph keeps the parameters short.
  if (at::GradMode::is_enabled()) shortened_ = false;
}

}  // namespace lockstep
