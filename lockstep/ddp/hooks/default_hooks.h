// The plain hooks. N is the size of the group.
#pragma once

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/process_group.h"

namespace lockstep {

// g <- sum over ranks of g_r, divided by N inside the reduction: what DistributedDataParallel does without a hook.
CommHook allreduce_hook(Group group = {});
// The same in f16 or bf16: half the bytes of f32. The sum is made and divided in f32 and rounded once, so small
// gradients do not vanish by being divided first. See fp16_compress_wrapper for ranges.
CommHook fp16_compress_hook(Group group = {});
CommHook bf16_compress_hook(Group group = {});
// Nothing: every rank keeps its own gradients, and the models part ways. For measuring what communication costs.
CommHook noop_hook();

}  // namespace lockstep
