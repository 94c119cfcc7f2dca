// Finding out which rank is missing. debug/debug.h has the levels at which every collective is compared.
// Thread safety: any thread; ranks call in the same order.
#pragma once

#include <optional>
#include <source_location>

#include "lockstep/group/process_group.h"

namespace lockstep {

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
