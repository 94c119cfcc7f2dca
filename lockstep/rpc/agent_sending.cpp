// An agent's requests: those that wait for an answer, when their time is over, and asking again.
//
// A request is in pending_ from before it is sent until exactly one of these takes it out, under mutex_, and
// then calls its on_answer without the lock: the answer (take_answer), its deadline (expire), the loss of the
// worker (take_loss), the end of the agent (close), or a failure to send it. An answer that finds nothing
// there comes too late, and is dropped.
#include <limits>

#include "lockstep/base/detail/text.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/internal/copy_wait.h"
#include "lockstep/rpc/internal/pool.h"
#include "lockstep/rpc/internal/worker_directory.h"

namespace lockstep::rpc {
namespace {

constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();
// A request without a timeout does not wait for ever for a connection.
constexpr Milliseconds kConnect{30'000};
constexpr std::chrono::microseconds kSmallCopy{100};
// Of request_again.
constexpr Milliseconds kFirstPause{1000};
constexpr double kGrowth = 1.5;

transport::Message make_message(std::uint8_t kind, std::uint64_t id, Payload payload) {
  return {.kind = kind,
          .id = id,
          .body = transport::owned_blob(std::move(payload.body)),
          .blobs = std::move(payload.blobs)};
}

// A small copy is over before another thread would have been woken for it.
bool over_soon(object::DeviceCopies& copies) {
  const Deadline limit = Deadline::after(kSmallCopy);
  while (!copies.over()) {
    if (limit.expired()) return false;
  }
  return true;
}

struct Retry {
  std::weak_ptr<Agent> agent;
  WorkerId to;
  MessageKind kind;
  Payload payload;
  std::string what;
  int n_left;
  Milliseconds pause;
  Promise<Agent::Answer> promise;
};

// The Retry is kept alive by its own callback, and refers to the agent weakly: a pending retry must not keep
// an agent from ending.
void try_once(const std::shared_ptr<Retry>& retry) {
  const auto agent = retry->agent.lock();
  if (!agent) {
    retry->promise.fail(
        {.failure = {.kind = ErrorKind::kAborted, .message = retry->what + ": the agent is gone"}});
    return;
  }
  --retry->n_left;
  agent->request(retry->to, retry->kind, retry->payload, retry->pause, retry->what,
                 [retry](Agent::Answer* answer, const CallFailure* failure) {
                   if (answer == nullptr && failure->failure.kind == ErrorKind::kTimeout &&
                       !failure->remote && retry->n_left > 0) {
                     retry->pause = Milliseconds(
                         static_cast<std::int64_t>(static_cast<double>(retry->pause.count()) * kGrowth));
                     try_once(retry);
                     return;
                   }
                   auto& state = *retry->promise.state();
                   auto callbacks = answer != nullptr ? state.set(std::move(*answer)) : state.fail(*failure);
                   if (const auto alive = retry->agent.lock()) {
                     alive->run_callbacks(std::move(callbacks));
                   } else {
                     internal::FutureBase::run(std::move(callbacks));
                   }
                 });
}

}  // namespace

// A message with tensors of devices is sent by a thread of the agent when they are copied, unless that takes no time
// worth a switch of threads: its caller goes on meanwhile.
void Agent::request(WorkerId to, MessageKind kind, Payload payload, Milliseconds timeout,
                    const std::string& what, OnAnswer on_answer, const internal::FutureBase* future) {
  const Deadline deadline = Deadline::after(timeout);
  const std::uint64_t id = new_id();
  {
    base::MutexLock lock(mutex_);
    if (closed()) {
      lock.unlock();
      const CallFailure value{.failure = {.kind = ErrorKind::kAborted,
                                          .message = base::cat(what, ": the RPC agent was shut down")}};
      on_answer(nullptr, &value);
      return;
    }
    // Before it is sent: the answer may arrive before send() returns, on another thread.
    pending_.emplace(id, Pending{.on_answer = std::move(on_answer),
                                 .to = to,
                                 .deadline = deadline,
                                 .timeout = timeout,
                                 .what = what,
                                 .future = future});
  }
  note_deadline(deadline);
  if (!payload.copies || over_soon(*payload.copies)) {
    send_request(to, kind, id, std::move(payload), deadline, what);
    return;
  }
  run([self = shared_from_this(), to, kind, id, payload = std::move(payload), deadline, what] {
    self->send_when_copied(to, kind, id, payload, deadline, what);
  });
}

void Agent::send_when_copied(WorkerId to, MessageKind kind, std::uint64_t id, const Payload& payload,
                             Deadline deadline, const std::string& what) {
  try {
    internal::wait_for_copies(*this, *payload.copies, deadline);
  } catch (...) {
    const CallFailure value = current_call_failure();
    if (const auto pending = take_pending(id)) end_call(*pending, nullptr, &value);
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    if (!pending_.contains(id)) return;  // it ended meanwhile: its caller knows that it was not sent in time
  }
  send_request(to, kind, id, payload, deadline, what);
}

void Agent::send_request(WorkerId to, MessageKind kind, std::uint64_t id, Payload payload, Deadline deadline,
                         const std::string& what) {
  // The guard is kept until the message is sent: if it is not, the forks that the message carried are given
  // back with it.
  const auto guard = std::move(payload.guard);
  auto failure = transport_->send(to, make_message(static_cast<std::uint8_t>(kind), id, std::move(payload)),
                                  deadline.is_never() ? Deadline::after(kConnect) : deadline);
  if (!failure) {
    if (guard) guard->sent();
    return;
  }
  const auto pending = take_pending(id);
  if (!pending) return;  // take_loss or close had it first, and has reported it
  if (failure->kind == ErrorKind::kPeerLost) {
    note_unreachable(to, *failure);
    failure = directory_->lost(to, what);
  }
  const CallFailure value{.failure = std::move(*failure)};
  pending->on_answer(nullptr, &value);
}

Future<Agent::Answer> Agent::request(WorkerId to, MessageKind kind, Payload payload, Milliseconds timeout,
                                     const std::string& what) {
  Promise<Answer> promise(weak_from_this());
  request(
      to, kind, std::move(payload), timeout, what,
      [weak = weak_from_this(), promise](Answer* answer, const CallFailure* failure) {
        auto callbacks =
            answer != nullptr ? promise.state()->set(std::move(*answer)) : promise.state()->fail(*failure);
        if (const auto agent = weak.lock()) {
          agent->run_callbacks(std::move(callbacks));
        } else {
          internal::FutureBase::run(std::move(callbacks));
        }
      },
      promise.state().get());
  return promise.future();
}

// Linear in the calls in flight: asked once per wait, after ten seconds.
base::Awaited Agent::awaited(const internal::FutureBase& future) const {
  std::optional<WorkerId> to;
  base::Awaited found;
  {
    const base::MutexLock lock(mutex_);
    for (const auto& [id, pending] : pending_) {
      if (pending.future != &future) continue;
      to = pending.to;
      found = {.text = pending.what, .deadline = pending.deadline};
    }
  }
  if (to) {
    found.text = base::cat("worker ", self().name, " waits for worker ", info(*to).name, ": ", found.text);
  } else {
    // Made by then() or collect_all, or a Promise of this worker's: something else ends it.
    found.text = base::cat(
        "worker ", self().name,
        " waits for a future that none of its calls completes directly; its calls without an answer: ",
        unanswered());
  }
  return found;
}

std::string Agent::unanswered() const {
  constexpr std::size_t kNamed = 4;
  std::vector<std::pair<WorkerId, std::string>> calls;
  std::size_t n = 0;
  {
    const base::MutexLock lock(mutex_);
    n = pending_.size();
    for (const auto& [id, pending] : pending_) {
      if (calls.size() == kNamed) break;
      calls.emplace_back(pending.to, pending.what);
    }
  }
  std::string text;
  for (const auto& [to, what] : calls)
    text += base::cat(text.empty() ? "" : ", ", info(to).name, " (", what, ")");
  if (n > calls.size()) text += base::cat(" and ", n - calls.size(), " more");
  return text.empty() ? "none" : text;
}

// A worker that died before anything was sent to it has no connection whose end could tell.
void Agent::note_unreachable(WorkerId to, const Failure& failure) {
  const std::uint64_t incarnation = directory_->incarnation(to);
  if (incarnation == 0 || closed()) return;
  const std::string cause = failure.peer ? failure.peer->cause : failure.message;
  run([this, to, cause, incarnation] { take_loss(to, cause, false, incarnation); });
}

// earliest_ns_ is at most the earliest deadline in pending_: a lower bound, so that the poller wakes too
// early rather than too late. Lowered by compare-and-swap, since any thread sends. Whoever lowers it wakes
// the poller, which may sleep until the old one.
void Agent::note_deadline(Deadline deadline) {
  const std::int64_t ns = deadline.monotonic_ns();
  std::int64_t earliest = earliest_ns_.load();
  while (ns < earliest && !earliest_ns_.compare_exchange_weak(earliest, ns)) {
  }
  if (ns < earliest) transport_->wake();  // the poller would sleep past it
}

std::optional<Agent::Pending> Agent::take_pending(std::uint64_t id, std::optional<WorkerId> from) {
  const base::MutexLock lock(mutex_);
  const auto found = pending_.find(id);
  if (found == pending_.end() || (from && found->second.to != *from)) return std::nullopt;
  std::optional<Pending> pending = std::move(found->second);
  pending_.erase(found);
  return pending;
}

std::vector<Agent::Pending> Agent::take_all(const std::function<bool(const Pending&)>& which) {
  std::vector<Pending> taken;
  const base::MutexLock lock(mutex_);
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    if (which(entry->second)) {
      taken.push_back(std::move(entry->second));
      entry = pending_.erase(entry);
    } else {
      ++entry;
    }
  }
  return taken;
}

void Agent::fail_pending(const std::function<bool(const Pending&)>& which,
                         const std::function<Failure(const Pending&)>& why) {
  for (const auto& pending : take_all(which)) {
    const CallFailure failure{.failure = why(pending)};
    end_call(pending, nullptr, &failure);
  }
}

void Agent::expire() {
  const std::int64_t now = Deadline::now().monotonic_ns();
  if (earliest_ns_.load() > now) return;
  std::int64_t next = kNeverNs;
  // Before pending_ is read: a request that is added meanwhile is either seen by take_all or lowers it again.
  earliest_ns_ = kNeverNs;
  const auto late = take_all([&](const Pending& pending) {
    if (pending.deadline.monotonic_ns() <= now) return true;
    next = std::min(next, pending.deadline.monotonic_ns());
    return false;
  });
  // The bound holds again before callbacks run: they may last, and then another thread is the poller.
  std::int64_t earliest = earliest_ns_.load();
  while (next < earliest && !earliest_ns_.compare_exchange_weak(earliest, next)) {
  }
  if (late.empty()) return;
  pool_->run_long([&] {
    for (const auto& pending : late) {
      const CallFailure failure{.failure = timeout_failure(pending.what, pending.timeout)};
      end_call(pending, nullptr, &failure);
    }
  });
}

Future<Agent::Answer> Agent::request_again(WorkerId to, MessageKind kind, Payload payload,
                                           const std::string& what, int n_tries) {
  const auto retry = std::make_shared<Retry>(Retry{.agent = weak_from_this(),
                                                   .to = to,
                                                   .kind = kind,
                                                   .payload = std::move(payload),
                                                   .what = what,
                                                   .n_left = n_tries,
                                                   .pause = kFirstPause,
                                                   .promise = Promise<Answer>(weak_from_this())});
  auto future = retry->promise.future();
  try_once(retry);
  return future;
}

}  // namespace lockstep::rpc
