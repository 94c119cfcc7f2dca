#include <memory>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/ddp/hooks.h"

namespace lockstep {
namespace {

std::shared_ptr<PowerSGDState> power_sgd(const CommHookOptions& options, std::int64_t rank) {
  return std::make_shared<PowerSGDState>(
      PowerSGDOptions{.group = options.group, .matrix_approximation_rank = rank});
}

}  // namespace

CommHook make_comm_hook(DdpCommHookType type, const CommHookOptions& options) {
  switch (type) {
    case DdpCommHookType::kAllReduce:
      return allreduce_hook(options);
    case DdpCommHookType::kFp16Compress:
      return fp16_compress_hook(options);
    case DdpCommHookType::kBf16Compress:
      return bf16_compress_hook(options);
    case DdpCommHookType::kQuantizePerTensor:
      return quantization_pertensor_hook(options);
    case DdpCommHookType::kQuantizePerChannel:
      return quantization_perchannel_hook({.group = options.group});
    case DdpCommHookType::kPowerSgd:
      return powerSGD_hook(power_sgd(options, 1));
    case DdpCommHookType::kPowerSgdRank2:
      return powerSGD_hook(power_sgd(options, 2));
    case DdpCommHookType::kBatchedPowerSgd:
      return batched_powerSGD_hook(power_sgd(options, 1));
    case DdpCommHookType::kBatchedPowerSgdRank2:
      return batched_powerSGD_hook(power_sgd(options, 2));
    case DdpCommHookType::kNoop:
      return noop_hook();
  }
  base::raise(ErrorKind::kUsage,
              base::cat("there is no communication hook of type ", static_cast<int>(type)));
}

void register_ddp_comm_hook(DdpCommHookType type, DdpCore& model, CommHookOptions options) {
  if (!options.group) options.group = model.group();
  model.register_comm_hook(make_comm_hook(type, options));
}

}  // namespace lockstep
