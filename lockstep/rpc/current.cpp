#include "lockstep/rpc/current.h"

#include "lockstep/base/text.h"

namespace lockstep::rpc {
namespace {

struct Slot {
  std::mutex mutex;
  std::shared_ptr<Agent> agent;  // guarded by mutex
};

// Null when nothing was ever set for this rank thread.
Slot* slot_here() {
  static Slot process_slot;
  RankThread* rank = this_rank_thread();
  return rank == nullptr ? &process_slot : static_cast<Slot*>(rank->agent.get());
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
    raise(ErrorKind::kUsage, cat(what, ": RPC is not initialised in this process; call rpc::init_rpc first"));
  }
  return agent;
}

void set_current_agent(std::shared_ptr<Agent> agent) {
  if (RankThread* rank = this_rank_thread(); rank != nullptr && !rank->agent) rank->agent = std::make_shared<Slot>();
  Slot* slot = slot_here();
  std::shared_ptr<Agent> old;
  const std::lock_guard lock(slot->mutex);
  if (agent && slot->agent) raise(ErrorKind::kUsage, "RPC is initialised already: shut it down first");
  old = std::exchange(slot->agent, std::move(agent));
}

}  // namespace lockstep::rpc
