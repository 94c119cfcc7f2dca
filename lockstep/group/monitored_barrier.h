// Finds out which rank is missing. debug/debug.h has the levels at which every collective is compared.
// Thread safety: any thread; all ranks call in the same order.
#pragma once

#include <optional>
#include <source_location>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct MonitoredBarrierOptions {
  Group group{};
  std::optional<Milliseconds> timeout{};  // of rank 0; zero: checks once; unset: the group's
  bool wait_all_ranks = false;            // name every missing rank, not only the first
  std::source_location where = std::source_location::current();
};
// A barrier that reports which ranks are missing. Works with every back end: it uses the group's store, not
// its engine. Rank 0 of the group waits for a message from each rank and then releases all; all pass or none.
// On rank 0: kTimeout naming the ranks that did not arrive in time. On the others, which wait for rank 0 as
// long as the group's timeout (or this one, when longer) allows: kTimeout saying that they arrived and why
// rank 0 did not release them. The group stays usable. A group of one: no effect.
void monitored_barrier(MonitoredBarrierOptions options = {});

}  // namespace lockstep
