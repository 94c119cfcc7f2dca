// Helpers shared by most hooks. Private to hooks/.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {

// A hook may run on a thread without a default group, so it holds its own.
inline Group resolved(Group group) {
  return group ? group : default_group();
}

// Starts replacing `tensor` by its mean over the group.
inline GradFuture average(const at::Tensor& tensor, const Group& group) {
  return all_reduce(tensor, {.op = ReduceOp::kAvg, .group = group, .async_op = true}).get_future();
}

// For callbacks: rethrows the operation's error, if any.
inline void rethrow_error(const c10::ivalue::Future& future) {
  if (future.hasError()) std::rethrow_exception(future.exception_ptr());
}

}  // namespace lockstep::internal
