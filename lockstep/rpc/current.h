// The current agent of this rank: one per process, or one per rank thread.
// Thread safety: functions may be called from any thread, set_current_agent and count_init by one thread of a
// rank at a time.
#pragma once

#include <memory>

#include "lockstep/rpc/agent.h"

namespace lockstep::rpc {

// Null clears it. Raises kUsage when there is one already. `session` is whatever init_rpc keeps for shutdown.
void set_current_agent(std::shared_ptr<Agent> agent, std::shared_ptr<void> session = {});
std::shared_ptr<void> current_session() noexcept;
// How often init_rpc was called for this rank before.
int count_init();

}  // namespace lockstep::rpc
