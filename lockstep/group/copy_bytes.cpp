#include "lockstep/group/internal/copy_bytes.h"

#include <ATen/core/grad_mode.h>

#include <cstring>

#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

c10::Device device_of(const lockstep_op& op) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(op.device)};
}

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t n_bytes, const lockstep_op& op) {
  if (op.device_kind == LOCKSTEP_HOST_MEMORY) {
    std::memmove(to, from, n_bytes);
    return;
  }
  const at::NoGradGuard no_grad;
  const auto n = static_cast<std::int64_t>(n_bytes);
  const auto source = borrow(const_cast<void*>(from), n, at::kByte, device_of(op));
  borrow(to, n, at::kByte, device_of(op)).copy_(source, /*non_blocking=*/true);
}

void await_copies(const lockstep_op& op) {
  if (op.device_kind != LOCKSTEP_HOST_MEMORY) synchronize(current_stream(device_of(op)));
}

}  // namespace lockstep::internal
