// The basic hooks. N is the size of the group. Thread safety: as comm_hook.h.
#pragma once

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

// g <- sum over ranks of g_r, divided by N inside the reduction: what DistributedDataParallel does without a
// hook.
CommHook allreduce_hook(CommHookOptions options = {});
// The same in f16 or bf16: half the bytes of f32. The sum is computed and divided in f32 and rounded once, so
// small gradients do not underflow by being divided first. See fp16_compress_wrapper for ranges.
CommHook fp16_compress_hook(CommHookOptions options = {});
CommHook bf16_compress_hook(CommHookOptions options = {});
// No communication: every rank keeps its own gradients, and parameters diverge. For measuring the cost of
// communication.
CommHook noop_hook();

}  // namespace lockstep
