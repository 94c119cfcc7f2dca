// Which agent is this rank's: one per process, or one per rank thread.
#pragma once

#include <memory>

#include "lockstep/rpc/agent.h"

namespace lockstep::rpc {

// Null takes it away. Raises kUsage when there is one already. `session` is whatever init_rpc keeps for shutdown.
void set_current_agent(std::shared_ptr<Agent> agent, std::shared_ptr<void> session = {});
std::shared_ptr<void> current_session() noexcept;
// How often init_rpc was called for this rank before.
int count_init();

}  // namespace lockstep::rpc
