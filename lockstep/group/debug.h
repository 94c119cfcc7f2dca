// Finding out which rank is out of step. The debug level comes from TORCH_DISTRIBUTED_DEBUG or from here:
//   kOff     (default) nothing extra
//   kInfo    DDP tells how it was built and names parameters in its errors
//   kDetail  as kInfo; and groups made from now on compare every collective between their ranks before it runs: a rank
//            that is missing, or runs another collective or other shapes, is an error on every rank that names it,
//            instead of a hang. Costs several store round trips per collective. send and recv are not compared.
// Thread safety: every function may be called from any thread. The level is the process's.
#pragma once

#include <optional>
#include <source_location>

#include "lockstep/group/process_group.h"

namespace lockstep {

enum class DebugLevel : int { kOff = 0, kInfo = 1, kDetail = 2 };

// OFF, INFO or DETAIL in TORCH_DISTRIBUTED_DEBUG (any case; unset: OFF); raises kUsage naming another value.
void set_debug_level_from_env();
void set_debug_level(DebugLevel level);
// The first call reads the environment, unless a level was set; raises as set_debug_level_from_env.
DebugLevel get_debug_level();

struct MonitoredBarrierOptions {
  Group group{};
  std::optional<Milliseconds> timeout{};  // rank 0's patience; zero: one look; unset: the group's
  bool wait_all_ranks = false;            // name every rank that is missing, not the first alone
  std::source_location where = std::source_location::current();
};
// A barrier that knows who is missing. Works with every back end: it uses the group's store, not its engine. Rank 0 of
// the group waits for a word of each rank and then lets all go; all pass or none.
// On rank 0: kTimeout naming the ranks that did not come in time. On the others, which wait for rank 0 as long as the
// group's timeout (or this one, when longer) allows: kTimeout saying that they came and why rank 0 did not let them go.
// The group can be used on. A group of one: nothing to do.
void monitored_barrier(MonitoredBarrierOptions options = {});

}  // namespace lockstep
