// What DistributedDataParallel does with the future that a communication hook returned.
// Thread safety: every function may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::internal {

// The tensor in a hook's completed future: the value itself, or the only element of a list. Raises kUsage
// when it is anything else or its number of elements differs from that of `like`.
at::Tensor hook_result(const c10::ivalue::Future& future, const std::string& hook, const at::Tensor& like);
// Waits for a future of `whose`, since c10's own wait has no deadline. Raises kTimeout after `timeout`
// (kNoTimeout: never), and the future's error.
void await_hook(const GradFuture& future, Milliseconds timeout, const std::string& whose);

}  // namespace lockstep::internal
