// Options of ZeroRedundancyOptimizer, without the class. Thread safety: a plain value.
#pragma once

#include <source_location>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct ZeroOptions {
  Group group{};  // null: the default group
  // Parameters are moved into one flat bucket per rank in the group's shared memory, so a rank's updates are
  // sent by one broadcast, without copies. Otherwise one broadcast per parameter.
  bool parameters_as_bucket_view = false;
  // The step runs inside backward(): pass the optimizer to a model's overlap_optimizer. step() itself then
  // only logs a warning, and neither groups nor requires_grad may change.
  bool overlap_with_ddp = false;
  std::source_location where = std::source_location::current();
};

}  // namespace lockstep
