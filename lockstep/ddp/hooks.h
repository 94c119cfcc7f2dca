// The library of communication hooks: what can be done with a bucket of gradients instead of averaging it as it is.
//
//   model->register_comm_hook(fp16_compress_hook());                                  // half the bytes
//   model->register_comm_hook(powerSGD_hook(std::make_shared<PowerSGDState>()));      // a small part of them
//   model->register_comm_hook(fp16_compress_wrapper(allreduce_hook()));               // the first again, composed
//   register_ddp_comm_hook(DdpCommHookType::kFp16Compress, *model);                   // and by name
//
// hooks/default_hooks.h       averaging, in half types, not at all
// hooks/compose.h             hooks around hooks: the compressing wrappers, and a frame for your own
// hooks/quantization_hooks.h  eight bits per element
// hooks/power_sgd.h           low-rank factors with error feedback
// hooks/post_local_sgd.h      averaging inside a sub-group after a while
// hooks/auto_quantize.h       not a hook: collectives that travel in half types
//
// What holds for all of them. They are called on the thread that runs backward() (comm_hook.h) and start operations only
// there, so the order of operations is the same on all ranks. What follows an operation (casting back, decompressing)
// runs on the thread "ls-completion", beside the rest of backward(), and starts none. A null group is the default one of
// the thread that makes the hook. Results land in the bucket's own buffer.
#pragma once

#include <cstdint>

#include "lockstep/ddp/ddp_core.h"
#include "lockstep/ddp/hooks/auto_quantize.h"
#include "lockstep/ddp/hooks/compose.h"
#include "lockstep/ddp/hooks/default_hooks.h"
#include "lockstep/ddp/hooks/post_local_sgd.h"
#include "lockstep/ddp/hooks/power_sgd.h"
#include "lockstep/ddp/hooks/quantization_hooks.h"

namespace lockstep {

// The PowerSGD ones begin after 1000 iterations and take the other defaults of PowerSGDOptions, too.
enum class DdpCommHookType : std::uint8_t {
  kAllReduce,
  kFp16Compress,
  kBf16Compress,
  kQuantizePerTensor,
  kQuantizePerChannel,
  kPowerSgd,
  kPowerSgdRank2,
  kBatchedPowerSgd,
  kBatchedPowerSgdRank2,
  kNoop,
};

// The hook of that name, with a state of its own where it has one.
CommHook make_comm_hook(DdpCommHookType type, const Group& group = {});
// Registers it with the model: once, before the first backward pass, the same on all ranks, else kUsage. A null group is
// the model's.
void register_ddp_comm_hook(DdpCommHookType type, DdpCore& model, const Group& group = {});

}  // namespace lockstep
