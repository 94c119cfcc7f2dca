// The switch behind parallel/'s LossParallelScope. Thread safety: a setting of the calling thread.
#pragma once

namespace lockstep::dtensor_internal {

// On: an operator that computes a loss raises kUnsupported where it would gather a sharded input. Returns
// what was set before.
bool set_loss_parallel(bool on) noexcept;

}  // namespace lockstep::dtensor_internal
