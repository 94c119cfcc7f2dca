// An agent's RRefs: the values it owns for others, and the forks it holds of theirs. Programs use rref.h;
// this is for shutdown, for layers that reach values behind RRefs, and for tests.
//
// Thread safety: every method may be called from any thread. Values are destroyed by whoever releases them
// last, never under a lock. Ownership: shared by the agent and by every handle; handles that outlive the
// agent are harmless.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/detail/rref_on_wire.h"

namespace lockstep::rpc {

namespace internal {
class RRefTable;
enum class Control : std::uint8_t;
struct RRefActions;
struct RRefSend;
}  // namespace internal

class RRefManager;

// A value at its owner, perhaps one that is still being created.
struct OwnedValue {
  explicit OwnedValue(std::weak_ptr<internal::WaitHelper> helper) : promise(std::move(helper)) {}
  ~OwnedValue() { promise.state()->before_release(); }
  OwnedValue(const OwnedValue&) = delete;
  OwnedValue& operator=(const OwnedValue&) = delete;

  // Once: type and value must not come from two calls.
  void set(const ValueType* its_type, std::shared_ptr<void> value) {
    if (claimed.test_and_set()) return;
    type.store(its_type, std::memory_order_release);
    promise.set(std::move(value));
  }
  bool over() const { return promise.state()->over(); }
  // Pre: over(). The value as a T; raises what its creation failed with, kUsage when it is something else.
  std::shared_ptr<void> get(const std::type_info& wanted) const;
  template <class T>
  std::shared_ptr<T> get() const {
    return std::static_pointer_cast<T>(get(typeid(T)));
  }

  Promise<std::shared_ptr<void>> promise;
  std::atomic<const ValueType*> type{nullptr};  // set before the promise is
  std::atomic_flag claimed{};
};

// What the copies of one handle share. Its destruction ends the fork.
class RRefState {
 public:
  RRefState(std::shared_ptr<RRefManager> manager, internal::RRefOnWire ref, WorkerInfo owner,
            std::shared_ptr<OwnedValue> value = nullptr);
  ~RRefState();
  RRefState(const RRefState&) = delete;
  RRefState& operator=(const RRefState&) = delete;

  std::uint64_t id() const { return ref.rref; }
  bool is_owner() const { return value != nullptr; }
  bool confirmed() const;
  // Raises what the creation failed with, if this worker knows already, and kPeerLost when the owner is gone,
  // even if its number has been reused by another worker.
  void check() const;
  // Of the value, waiting until it is created. Asks the owner once.
  std::string type_name(std::optional<Milliseconds> timeout) const;
  // Waits, at the owner, until it is created. Raises kTimeout after `timeout` (unset: the RPC timeout),
  // kUsage when this worker is not the owner.
  void wait_made(std::optional<Milliseconds> timeout) const;
  // Done when the value is created, or its creation has failed. Raises kUsage for a fork that another worker
  // passed on.
  Future<void> creation() const;
  // "RRef 281474976710657 of worker1".
  std::string text() const;

  const std::shared_ptr<RRefManager> manager;
  const internal::RRefOnWire ref;  // fork 0 at the owner
  const WorkerInfo owner;
  const std::shared_ptr<OwnedValue> value;  // at the owner, else null
  const std::uint64_t losses_before;        // of workers with the owner's number
  std::optional<Promise<void>> created{};   // where remote() was called; set before the handle is handed out

 private:
  mutable base::Mutex mutex_;
  mutable std::string type_name_ LOCKSTEP_GUARDED_BY(mutex_);  // empty: not asked for yet
};

class RRefManager final : public std::enable_shared_from_this<RRefManager> {
 public:
  explicit RRefManager(Agent& agent);
  ~RRefManager();
  RRefManager(const RRefManager&) = delete;
  RRefManager& operator=(const RRefManager&) = delete;

  // Shutdown. First every worker drops its users, then every worker waits; then nothing is left but what
  // other workers hold.
  // As if all handles that refer to other workers' values were gone; using one raises kUsage from now on.
  void drop_users();
  // Waits until no control message is in flight and no fork is unconfirmed; false at the deadline.
  bool wait_idle(Deadline deadline);
  // What other workers still refer to, as text; empty when there is nothing.
  std::string leaks() const;
  enum class LeakCheck : std::uint8_t { kWarn, kStrict };
  // Logs leaks(), or raises it (kUsage).
  void check_leaks(LeakCheck check) const;

  // num_owner_rrefs, num_forks, num_pending_users, num_pending_futures, as torch names them.
  void debug_info(std::map<std::string, std::string>& info) const;

  // The owner's side: the value that a message asks for, created or not yet. Raises kPeerLost when it is
  // deleted, which takes the loss of a worker that passed the RRef on; names those that are lost.
  std::shared_ptr<OwnedValue> value_of(std::uint64_t rref);

  // For rref.h and remote.h.
  std::shared_ptr<RRefState> own(const ValueType* type, std::shared_ptr<void> value);
  std::shared_ptr<RRefState> start_remote(const internal::OutgoingCall& call);
  enum class Ask : std::uint8_t { kValue = 0, kType = 1 };
  void fetch(const RRefState& state, Ask ask, std::optional<Milliseconds> timeout, Agent::OnAnswer on_answer,
             const internal::FutureBase* future);
  // Null when the agent is gone, or is that of the process from which this one was forked.
  std::shared_ptr<Agent> agent() const { return made_here_ ? agent_.lock() : nullptr; }
  // As above, but raises kUsage instead of returning null.
  std::shared_ptr<Agent> agent_for(const char* what) const;
  bool confirmed(std::uint64_t fork) const;
  // How many workers with this number are gone, and why the last one is.
  struct Losses {
    std::uint64_t n = 0;
    std::string cause{};
  };
  Losses losses(WorkerId worker) const;

  // For messages that carry RRefs (rref_scope.h).
  internal::RRefOnWire share(const RRefState& state, WorkerId to);
  void unshare(const std::vector<internal::RRefOnWire>& children) noexcept;
  std::shared_ptr<RRefState> receive(const internal::RRefOnWire& ref, WorkerId from);

 private:
  friend class RRefState;
  friend class RRefService;
  using Actions = internal::RRefActions;

  // Runs `step(*table_, actions)` under the lock and the actions without (internal/with_table.h).
  template <class Step>
  auto with_table(Step&& step);
  void carry_out(Actions actions) noexcept;
  void send(const internal::RRefSend& send);
  void drop(std::uint64_t fork) noexcept;
  void serve_control(Request request, internal::Control control);
  void serve_fetch(Request request);
  void serve_remote(Request request);
  void on_lost(WorkerId peer, const std::string& cause);
  void on_joined(WorkerId peer);
  // Values that are not created yet never will be.
  void close();
  // The agent is gone: releases what it kept for others.
  void end() noexcept;

  const base::MadeHere made_here_;
  const std::weak_ptr<Agent> agent_;
  const WorkerInfo self_;
  mutable base::Mutex mutex_;
  mutable base::ConditionVariable changed_;
  const std::unique_ptr<internal::RRefTable> table_ LOCKSTEP_PT_GUARDED_BY(mutex_);
  std::map<WorkerId, Losses> losses_ LOCKSTEP_GUARDED_BY(mutex_);
};

// The agent's own.
RRefManager& rref_manager(Agent& agent);
// Called by Agent::start.
std::unique_ptr<Service> make_rref_service(Agent& agent);

}  // namespace lockstep::rpc
