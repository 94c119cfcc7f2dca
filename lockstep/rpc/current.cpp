#include "lockstep/rpc/current.h"

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep::rpc {
namespace {

struct Slot {
  // A program that ends without shutdown.
  ~Slot() {
    session = nullptr;
    try {
      if (agent) agent->close(Milliseconds(0));
    } catch (...) {
      log(LogLevel::kError, "an RPC agent could not be closed: " + current_failure().message);
    }
  }
  std::mutex mutex;
  // Guarded by mutex.
  std::shared_ptr<Agent> agent;
  std::shared_ptr<void> session;
  int n_inits = 0;
};

// Null when nothing was ever set for this rank thread.
Slot* slot_here() {
  static Slot process_slot;
  RankThread* rank = this_rank_thread();
  return rank == nullptr ? &process_slot : static_cast<Slot*>(rank->agent.get());
}

Slot& make_slot() {
  if (RankThread* rank = this_rank_thread(); rank != nullptr && !rank->agent)
    rank->agent = std::make_shared<Slot>();
  return *slot_here();
}

}  // namespace

std::shared_ptr<Agent> current_agent_if_any() noexcept {
  Slot* slot = slot_here();
  if (slot == nullptr) return nullptr;
  const std::lock_guard lock(slot->mutex);
  return slot->agent;
}

std::shared_ptr<Agent> current_agent(const char* what) {
  auto agent = current_agent_if_any();
  if (!agent || agent->closed()) {
    raise(ErrorKind::kUsage,
          cat(what, ": RPC is not initialised in this process, or was shut down; call rpc::init_rpc first"));
  }
  return agent;
}

void set_current_agent(std::shared_ptr<Agent> agent, std::shared_ptr<void> session) {
  Slot& slot = make_slot();
  {
    const std::lock_guard lock(slot.mutex);
    if (agent && slot.agent) raise(ErrorKind::kUsage, "RPC is initialised already: shut it down first");
    agent.swap(slot.agent);
    session.swap(slot.session);
  }
  // What was there ends here, not under the lock.
}

std::shared_ptr<void> current_session() noexcept {
  Slot* slot = slot_here();
  if (slot == nullptr) return nullptr;
  const std::lock_guard lock(slot->mutex);
  return slot->session;
}

int count_init() {
  Slot& slot = make_slot();
  const std::lock_guard lock(slot.mutex);
  return slot.n_inits++;
}

}  // namespace lockstep::rpc
