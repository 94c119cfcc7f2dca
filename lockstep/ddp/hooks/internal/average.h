// What most hooks do at some point. Private to hooks/.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {

// A hook runs on a thread that may know no default group: it holds its own.
inline Group resolved(Group group) {
  return group ? group : default_group();
}

// Starts to replace `tensor` by its mean over the group.
inline GradFuture average(const at::Tensor& tensor, const Group& group) {
  return all_reduce(tensor, {.op = ReduceOp::kAvg, .group = group, .async_op = true}).get_future();
}

// For callbacks: the operation's error, if it ended in one.
inline void rethrow_error(const c10::ivalue::Future& future) {
  if (future.hasError()) std::rethrow_exception(future.exception_ptr());
}

}  // namespace lockstep::internal
