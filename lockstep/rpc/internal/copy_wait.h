// Waiting for the copies of a message, on a thread of the agent or of the program.
// Thread safety: may be called from any thread.
#pragma once

#include "lockstep/rpc/agent.h"

namespace lockstep::rpc::internal {

// While it blocks the agent may start another thread, as for a thread that waits for a future. Raises kTimeout.
inline void wait_for_copies(Agent& agent, object::DeviceCopies& copies, Deadline deadline) {
  if (copies.over()) return;
  struct Asleep {
    explicit Asleep(Agent& which) : agent(which) { agent.before_sleep(); }
    ~Asleep() { agent.after_sleep(); }
    Asleep(const Asleep&) = delete;
    Asleep& operator=(const Asleep&) = delete;
    Agent& agent;
  } const asleep(agent);
  copies.wait(deadline);
}

}  // namespace lockstep::rpc::internal
