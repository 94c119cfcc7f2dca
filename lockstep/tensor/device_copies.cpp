#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/tensor/detail/device_stream.h"
#include "lockstep/tensor/internal/device_copies.h"

namespace lockstep::internal {
namespace {

// A wait that lasts looks this often: short against a copy that is worth waiting for.
constexpr std::chrono::microseconds kLook{20};
constexpr int kSpins = 200;

}  // namespace

// Pinning fails where the process may lock no more memory.
at::Tensor host_memory(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
  try {
    return at::empty_strided(sizes, strides, options.pinned_memory(true));
  } catch (const c10::Error&) {
    return at::empty_strided(sizes, strides, options);
  }
}

DeviceCopies::CopyStream& DeviceCopies::stream_for(c10::Device device) {
  const auto found =
      std::ranges::find_if(streams_, [&](const CopyStream& copy) { return copy.stream.device() == device; });
  if (found != streams_.end()) return *found;
  return streams_.emplace_back(
      CopyStream{.stream = pool_stream(device), .copied = c10::Event(device.type())});
}

// Conjugated, negated and strided tensors are made plain on the device, in the stream of the copy: nothing is computed in the
// caller's stream.
at::Tensor DeviceCopies::stage(const at::Tensor& tensor) {
  CopyStream& copy = stream_for(tensor.device());
  order(current_stream(tensor.device()), copy.stream);
  const c10::StreamGuard in_stream(copy.stream);
  const at::NoGradGuard no_grad;
  at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  if (!plain.is_non_overlapping_and_dense()) plain = plain.contiguous();
  const at::Tensor host = host_memory(plain.sizes(), plain.strides(), plain.scalar_type());
  host.copy_(plain, /*non_blocking=*/host.is_pinned());
  record_use(tensor, copy.stream);
  copy.copied.record(copy.stream);
  return host;
}

bool DeviceCopies::over() {
  return std::ranges::all_of(streams_, [](const CopyStream& copy) { return copy.copied.query(); });
}

// By looking: an event can be waited for only without an end.
void DeviceCopies::wait(Deadline deadline) {
  for (int i = 0; !over(); ++i) {
    if (deadline.expired()) {
      base::raise(ErrorKind::kTimeout,
                  "tensors of a message are not computed yet, or not copied to host memory: the GPU is busy "
                  "or stuck");
    }
    if (i >= kSpins) std::this_thread::sleep_for(kLook);
  }
}

}  // namespace lockstep::internal
