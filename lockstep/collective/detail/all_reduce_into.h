// all_reduce from one tensor into another. For dtensor/, whose results never share memory with inputs: one
// pass over the inputs, where a copy and an all_reduce in place would be two. Everything else as
// collectives.h.
#pragma once

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

// `input` is not changed. Both have the same type and sizes and share no memory. Inside a CoalescingScope of
// the group it raises kUsage.
Work all_reduce_into(at::Tensor output, at::Tensor input, AllReduceOptions options = {});

}  // namespace lockstep::internal
