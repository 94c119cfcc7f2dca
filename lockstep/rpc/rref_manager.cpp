#include "lockstep/rpc/detail/rref_manager.h"

#include <algorithm>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/detail/rref_scope.h"
#include "lockstep/rpc/internal/with_table.h"

namespace lockstep::rpc {

using internal::Control;
using internal::ForkEntry;
using internal::RRefOnWire;
using internal::RRefTable;

namespace {

// Of control messages: for hours, or until the worker is gone.
constexpr int kTries = 20;

MessageKind kind_of(Control control) {
  switch (control) {
    case Control::kFork:
      return MessageKind::kRRefFork;
    case Control::kAccept:
      return MessageKind::kRRefChild;
    default:
      return MessageKind::kRRefDelete;
  }
}

// `what` happened because of some of them; which one is not always known.
Failure because_of(const std::set<WorkerId>& lost, const std::shared_ptr<Agent>& agent,
                   const std::string& what) {
  std::string names;
  for (const auto worker : lost) {
    names += (names.empty() ? "" : ", ") + (agent ? agent->info(worker).name : base::cat("#", worker));
  }
  return {.kind = ErrorKind::kPeerLost,
          .message = base::cat(what, "; lost so far: ", names),
          .peer = lost.empty() ? LostPeer{} : LostPeer{.rank = *lost.begin(), .cause = "gone"}};
}

CallFailure shut_down() {
  return {.failure = {.kind = ErrorKind::kAborted, .message = "the RPC agent was shut down"}};
}

}  // namespace

RRefManager::RRefManager(Agent& agent)
    : agent_(agent.weak_from_this()),
      self_(agent.self()),
      table_(std::make_unique<RRefTable>(RRefTable::Options{
          .self = agent.self().id,
          .new_id = [weak = agent.weak_from_this()]() -> std::uint64_t {
            const auto alive = weak.lock();
            if (!alive) base::raise(ErrorKind::kAborted, "an RRef: the RPC agent is gone");
            return alive->new_id();
          },
          .new_value = [weak = agent.weak_from_this()] { return std::make_shared<OwnedValue>(weak); }})) {}

RRefManager::~RRefManager() = default;

// After the table's lock was released: sending may fail, values may be destroyed and futures end, each of
// which runs other code. The pattern of every change: with_table() locks, the table (a state machine without
// threads) decides, the lock is released, and what it decided is carried out here.
void RRefManager::carry_out(Actions actions) noexcept {
  try {
    for (const auto& entry : actions.sends) send(entry);
    if (actions.orphaned.empty()) return;
    std::set<WorkerId> lost;
    {
      const base::MutexLock lock(mutex_);
      lost = table_->lost_workers();
    }
    const CallFailure failure{
        .failure = because_of(lost, agent(),
                              "the worker that called remote() was lost before the call arrived here")};
    for (const auto& value : actions.orphaned) value->promise.fail(failure);
  } catch (...) {
    base::log(LogLevel::kError, "after a change of RRefs: " + base::current_failure().message);
  }
}

// Repeated until answered; the receiver recognises repetitions (RecentIds). A fork request that is never
// answered counts as refused.
void RRefManager::send(const internal::RRefSend& send) {
  const auto alive = agent();
  if (!alive || alive->closed()) return;
  base::ByteWriter writer;
  for (const auto& entry : send.entries) writer.put(entry.rref).put(entry.fork);
  // At most one message of a kind is in flight per worker (rref_table.h): entries that come up meanwhile are
  // batched by the table and returned by answered() or unanswered(), which this sends in turn.
  const auto answer = alive->request_again(send.to, kind_of(send.control), {.body = writer.take()},
                                           base::cat("a message about RRefs to worker ", send.to), kTries);
  answer.state()->on_over([self = shared_from_this(), state = answer.state(), to = send.to,
                           control = send.control] {
    if (state->failure() != nullptr) {
      self->with_table([&](RRefTable& table, Actions& actions) { table.unanswered(to, control, actions); });
      return;
    }
    std::vector<std::uint64_t> refused;
    base::ByteReader reader(state->value().body.bytes);
    while (const auto fork = reader.get<std::uint64_t>()) refused.push_back(*fork);
    self->with_table(
        [&](RRefTable& table, Actions& actions) { table.answered(to, control, refused, actions); });
  });
}

// In a forked child the end of a handle is the end of a copy; the lock may be that of a thread which is not
// here.
void RRefManager::drop(std::uint64_t fork) noexcept {
  if (!made_here_) return;
  try {
    with_table([&](RRefTable& table, Actions& actions) { table.drop(fork, actions); });
  } catch (...) {
    base::log(LogLevel::kError, "an RRef's end: " + base::current_failure().message);
  }
}

bool RRefManager::confirmed(std::uint64_t fork) const {
  const base::MutexLock lock(mutex_);
  return table_->confirmed(fork);
}

std::shared_ptr<Agent> RRefManager::agent_for(const char* what) const {
  auto alive = agent();
  if (!made_here_)
    base::raise(ErrorKind::kUsage,
                base::cat(what, ": this process was forked from the worker whose RRef this is"));
  if (!alive || alive->closed())
    base::raise(ErrorKind::kUsage, base::cat(what, ": the RPC agent it was made with was shut down"));
  return alive;
}

// Shutdown.

void RRefManager::drop_users() {
  with_table([&](RRefTable& table, Actions& actions) { table.drop_all(actions); });
}

bool RRefManager::wait_idle(Deadline deadline) {
  base::MutexLock lock(mutex_);
  base::SlowWait slow(deadline);
  // The lock is released while the line is made, since unanswered() takes the agent's.
  while (!changed_.wait_until(mutex_, slow.next().time_point(),
                              [&]() LOCKSTEP_REQUIRES(mutex_) { return table_->idle(); })) {
    if (deadline.expired()) return false;
    lock.unlock();
    slow.say_if_due([&] {
      const auto alive = agent();
      return base::cat("worker ", self_.name,
                       " waits for owners to confirm the release of its RRefs; its calls without an answer: ",
                       alive ? alive->unanswered() : "none");
    });
    lock.lock();
  }
  return true;
}

std::string RRefManager::leaks() const {
  std::string list;
  std::size_t n = 0;
  const base::MutexLock lock(mutex_);
  table_->for_each_forked([&](std::uint64_t rref, const auto& value, const auto& forks) {
    if (++n > 10) return;
    const ValueType* type = value->type.load();
    list += base::cat("\n  RRef ", rref,
                      type == nullptr ? "" : base::cat(" (", base::demangle(type->type->name()), ")"),
                      ", held by worker");
    for (const auto& [fork, holder] : forks) list += base::cat(" ", holder);
  });
  if (n == 0) return {};
  if (n > 10) list += base::cat("\n  and ", n - 10, " more");
  return base::cat("other workers still refer to ", n, " values of ", self_.name,
                   " that its end takes with it:", list);
}

void RRefManager::check_leaks(LeakCheck check) const {
  const auto text = leaks();
  if (text.empty()) return;
  if (check == LeakCheck::kStrict) base::raise(ErrorKind::kUsage, text);
  base::log(LogLevel::kWarn, text);
}

void RRefManager::debug_info(std::map<std::string, std::string>& info) const {
  const base::MutexLock lock(mutex_);
  info["num_owner_rrefs"] = std::to_string(table_->n_owned());
  info["num_forks"] = std::to_string(table_->n_forks());
  info["num_users"] = std::to_string(table_->n_users());
  info["num_pending_users"] = std::to_string(table_->n_pending_users());
  info["num_pending_futures"] = std::to_string(table_->n_on_the_way());
}

// Values.

// Not in the table: an owned value enters it when it is first shared. Until then the handle is all that holds
// it.
std::shared_ptr<RRefState> RRefManager::own(const ValueType* type, std::shared_ptr<void> value) {
  const auto alive = agent_for("an RRef");
  // fork 0: the owner's own handle is no fork and sends nothing when it ends.
  auto owned = std::make_shared<OwnedValue>(agent_);
  owned->set(type, std::move(value));
  return std::make_shared<RRefState>(
      shared_from_this(), RRefOnWire{.rref = alive->new_id(), .owner = self_.id}, self_, std::move(owned));
}

std::shared_ptr<OwnedValue> RRefManager::value_of(std::uint64_t rref) {
  std::set<WorkerId> lost;
  if (auto value = with_table([&](RRefTable& table, Actions&) {
        lost = table.lost_workers();
        return table.find(rref);
      })) {
    return value;
  }
  base::raise(because_of(
      lost, agent(),
      base::cat(
          "RRef ", rref, " of ", self_.name,
          " is gone: nobody was known to refer to it any more, since a worker was lost that had made it or "
          "passed it on")));
}

// The child is in the table before the message is sent. If it is not sent, the guard takes it back (unshare).
RRefOnWire RRefManager::share(const RRefState& state, WorkerId to) {
  state.check();
  RRefOnWire child;
  const bool shared = with_table([&](RRefTable& table, Actions&) {
    if (!state.is_owner()) return table.share_used(state.ref.fork, to, child);
    child = table.share_owned(state.ref.rref, state.value, to);
    return true;
  });
  if (!shared) base::raise(ErrorKind::kUsage, state.text() + " was released by shutdown: it cannot be sent");
  return child;
}

void RRefManager::unshare(const std::vector<RRefOnWire>& children) noexcept {
  if (!made_here_) return;
  try {
    with_table([&](RRefTable& table, Actions& actions) {
      for (const auto& child : children) table.unshare(child, actions);
    });
  } catch (...) {
    base::log(LogLevel::kError, "an RRef that was not sent: " + base::current_failure().message);
  }
}

// At the owner the message's fork ends at once, and the handle refers to the value itself; elsewhere the
// handle holds the fork.
std::shared_ptr<RRefState> RRefManager::receive(const RRefOnWire& ref, WorkerId from) {
  const auto alive = agent_for("an RRef");
  bool fits = false;
  auto value =
      with_table([&](RRefTable& table, Actions& actions) { return table.receive(ref, from, fits, actions); });
  if (!fits) base::raise(ErrorKind::kUsage, base::cat("worker ", from, " sent an RRef that it may not send"));
  if (value) {
    return std::make_shared<RRefState>(shared_from_this(), RRefOnWire{.rref = ref.rref, .owner = self_.id},
                                       self_, std::move(value));
  }
  return std::make_shared<RRefState>(shared_from_this(), ref, alive->info(ref.owner));
}

RRefManager::Losses RRefManager::losses(WorkerId worker) const {
  const base::MutexLock lock(mutex_);
  const auto found = losses_.find(worker);
  return found == losses_.end() ? Losses{} : found->second;
}

void RRefManager::on_lost(WorkerId peer, const std::string& cause) {
  {
    const base::MutexLock lock(mutex_);
    // Before the table acts on it: whoever sees the effects finds the reason.
    auto& losses = losses_[peer];
    ++losses.n;
    losses.cause = cause;
  }
  with_table([&](RRefTable& table, Actions& actions) { table.lost(peer, actions); });
}

// Only the table forgets the loss. The count of losses stays: handles made before it belong to the earlier
// worker.
void RRefManager::on_joined(WorkerId peer) {
  const base::MutexLock lock(mutex_);
  table_->joined(peer);
}

// Values that never came: those who wait for them must not wait for ever. The table stays, since messages
// still arrive.
void RRefManager::close() {
  std::vector<std::shared_ptr<OwnedValue>> values;
  {
    const base::MutexLock lock(mutex_);
    values = table_->values();
  }
  for (const auto& value : values) value->promise.fail(shut_down());
}

// Breaks cycles of ownership, and must run after the threads have ended: no handler can ask for a value any
// more.
void RRefManager::end() noexcept {
  // A value may hold RRefs, which hold this.
  std::vector<std::shared_ptr<OwnedValue>> values;
  {
    const base::MutexLock lock(mutex_);
    values = table_->take_values();
  }
  // And one that was asked for after close() holds those who wait for it, which hold it.
  for (const auto& value : values) value->promise.fail(shut_down());
}

// Messages.

// Pairs of numbers until the body ends; an incomplete last pair becomes fork 0, which names nothing. The
// answer lists the forks that were refused, usually none.
void RRefManager::serve_control(Request request, Control control) {
  std::vector<ForkEntry> entries;
  base::ByteReader reader(request.body());
  while (const auto rref = reader.get<std::uint64_t>()) {
    entries.push_back({.rref = *rref, .fork = reader.get<std::uint64_t>().value_or(0)});
  }
  const auto refused = with_table([&](RRefTable& table, Actions& actions) {
    return table.take(request.from(), control, entries, actions);
  });
  base::ByteWriter writer;
  for (const auto fork : refused) writer.put(fork);
  request.answer({.body = writer.take()});
}

// Handlers hold a plain pointer to the manager: they are called by threads that end before on_closed(), and
// the service lives longer.
class RRefService final : public Service {
 public:
  explicit RRefService(Agent& agent) : manager(std::make_shared<RRefManager>(agent)) {
    const auto control = [&](MessageKind kind, Control what) {
      agent.handle(kind, [manager = manager.get(), what](Request request) {
        manager->serve_control(std::move(request), what);
      });
    };
    control(MessageKind::kRRefFork, Control::kFork);
    control(MessageKind::kRRefChild, Control::kAccept);
    control(MessageKind::kRRefDelete, Control::kDelete);
    agent.handle(MessageKind::kRRefFetch,
                 [manager = manager.get()](Request request) { manager->serve_fetch(std::move(request)); });
    agent.handle(MessageKind::kRemoteCall,
                 [manager = manager.get()](Request request) { manager->serve_remote(std::move(request)); });
  }
  void on_lost(WorkerId peer, const std::string& cause) override { manager->on_lost(peer, cause); }
  void on_joined(WorkerId peer) override { manager->on_joined(peer); }
  void debug_info(std::map<std::string, std::string>& info) override { manager->debug_info(info); }

  void on_close() override { manager->close(); }
  void on_closed() override { manager->end(); }

  const std::shared_ptr<RRefManager> manager;
};

RRefManager& rref_manager(Agent& agent) {
  return *agent.service<RRefService>().manager;
}
std::unique_ptr<Service> make_rref_service(Agent& agent) {
  return std::make_unique<RRefService>(agent);
}

}  // namespace lockstep::rpc
