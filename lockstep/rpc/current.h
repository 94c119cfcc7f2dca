// Which agent is this rank's: one per process, or one per rank thread.
#pragma once

#include <memory>

#include "lockstep/rpc/agent.h"

namespace lockstep::rpc {

// Null takes it away. Raises kUsage when there is one already.
void set_current_agent(std::shared_ptr<Agent> agent);

}  // namespace lockstep::rpc
