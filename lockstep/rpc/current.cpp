#include "lockstep/rpc/current.h"

#include <atomic>
#include <new>

#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::rpc {
namespace {

struct Slot {
  // A program that ends without shutdown. What a forked child has is a copy: to close it would end the
  // parent's connections (the epoll set and the sockets are one for both) and wait for threads that are not
  // here. It is left where it is, for ever.
  ~Slot() {
    if (inherited()) {
      abandon();
      return;
    }
    session = nullptr;
    try {
      if (agent) agent->close(Milliseconds(0));
    } catch (...) {
      base::log(LogLevel::kError, "an RPC agent could not be closed: " + base::current_failure().message);
    }
  }
  // The agent is that of the process from which this one was forked. Asked without the mutex, which a thread
  // that is not here may have held.
  bool inherited() const { return set_at != base::n_forks(); }
  // Read without the mutex for the same reason: only the thread that forked is here.
  bool has_inherited() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { return inherited() && agent; }
  // Kept reachable, so that a leak checker sees a thing that is held and not one that was lost. Without the
  // mutex, as above.
  void abandon() noexcept LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
    struct Abandoned {
      std::shared_ptr<Agent> agent;
      std::shared_ptr<void> session;
      Abandoned* earlier;
    };
    static std::atomic<Abandoned*> last{nullptr};
    last = new Abandoned{std::move(agent), std::move(session), last.load()};
  }

  // In a forked child, before its first own agent.
  void begin_anew() noexcept {
    abandon();
    new (&mutex) base::Mutex;
    set_at = base::n_forks();
  }

  std::atomic<unsigned> set_at{base::n_forks()};  // n_forks when agent was set
  base::Mutex mutex;
  std::shared_ptr<Agent> agent LOCKSTEP_GUARDED_BY(mutex);
  std::shared_ptr<void> session LOCKSTEP_GUARDED_BY(mutex);
  int n_inits LOCKSTEP_GUARDED_BY(mutex) = 0;
};

// Null when nothing was ever set for this rank thread.
Slot* slot_here() {
  static Slot process_slot;
  base::RankThread* rank = base::this_rank_thread();
  return rank == nullptr ? &process_slot : static_cast<Slot*>(rank->agent.get());
}

Slot& make_slot() {
  if (base::RankThread* rank = base::this_rank_thread(); rank != nullptr && !rank->agent)
    rank->agent = std::make_shared<Slot>();
  Slot& slot = *slot_here();
  if (slot.inherited()) slot.begin_anew();
  return slot;
}

}  // namespace

std::shared_ptr<Agent> current_agent_if_any() noexcept {
  Slot* slot = slot_here();
  if (slot == nullptr || slot->inherited()) return nullptr;
  const base::MutexLock lock(slot->mutex);
  return slot->agent;
}

std::shared_ptr<Agent> current_agent(const char* what) {
  auto agent = current_agent_if_any();
  if (!agent || agent->closed()) {
    if (const Slot* slot = slot_here(); slot != nullptr && slot->has_inherited()) {
      base::raise(
          ErrorKind::kUsage,
          base::cat(what,
                    ": this process was forked from a worker and has no RPC of its own; call init_rpc, "
                    "or let the worker call"));
    }
    base::raise(
        ErrorKind::kUsage,
        base::cat(what, ": RPC is not initialised in this process, or was shut down; call init_rpc first"));
  }
  return agent;
}

void set_current_agent(std::shared_ptr<Agent> agent, std::shared_ptr<void> session) {
  Slot& slot = make_slot();
  {
    const base::MutexLock lock(slot.mutex);
    if (agent && slot.agent) base::raise(ErrorKind::kUsage, "RPC is initialised already: shut it down first");
    agent.swap(slot.agent);
    session.swap(slot.session);
  }
  // What was there ends here, not under the lock.
}

std::shared_ptr<void> current_session() noexcept {
  Slot* slot = slot_here();
  if (slot == nullptr || slot->inherited()) return nullptr;
  const base::MutexLock lock(slot->mutex);
  return slot->session;
}

int count_init() {
  Slot& slot = make_slot();
  const base::MutexLock lock(slot.mutex);
  return slot.n_inits++;
}

}  // namespace lockstep::rpc
