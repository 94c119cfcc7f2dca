// The library of communication hooks: alternatives to averaging a bucket of gradients in full precision.
//
//   model->register_comm_hook(fp16_compress_hook());                                  // half the bytes
//   model->register_comm_hook(powerSGD_hook(std::make_shared<PowerSGDState>()));      // a fraction of them
//   model->register_comm_hook(fp16_compress_wrapper(allreduce_hook()));               // the first again, composed
//   register_ddp_comm_hook(DdpCommHookType::kFp16Compress, *model);                   // and by name
//
// hooks/default_hooks.h       averaging, in half precision, or none
// hooks/compose.h             hooks around hooks: the compressing wrappers, and a base for custom ones
// hooks/quantization_hooks.h  eight bits per element
// hooks/power_sgd.h           low-rank factors with error feedback
// hooks/post_local_sgd.h      averaging inside a sub-group after a warm-up
// hooks/auto_quantize.h       not a hook: collectives in half precision
//
// Common to all: they are called on the thread that runs backward() (comm_hook.h) and start operations only
// there, so the order of operations is the same on all ranks. What follows an operation (casting back,
// decompressing) runs on the thread "ls-completion", concurrently with the rest of backward(), and starts
// none. A null group is the default group of the thread that creates the hook. Results are written to the
// bucket's own buffer. Thread safety: as comm_hook.h; a hook serves one model.
#pragma once

#include <cstdint>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/hooks/auto_quantize.h"
#include "lockstep/ddp/hooks/compose.h"
#include "lockstep/ddp/hooks/default_hooks.h"
#include "lockstep/ddp/hooks/post_local_sgd.h"
#include "lockstep/ddp/hooks/power_sgd.h"
#include "lockstep/ddp/hooks/quantization_hooks.h"

namespace lockstep {

class DdpCore;  // the base of every DistributedDataParallel (ddp.h)

// The PowerSGD hooks start after 1000 iterations and use the defaults of PowerSGDOptions.
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

// The hook of that name, with its own state where it has one.
CommHook make_comm_hook(DdpCommHookType type, const CommHookOptions& options = {});
// Registers it with the model: once, before the first backward pass, the same on all ranks; raises kUsage
// otherwise. Here a null group is the model's.
void register_ddp_comm_hook(DdpCommHookType type, DdpCore& model, CommHookOptions options = {});

}  // namespace lockstep
