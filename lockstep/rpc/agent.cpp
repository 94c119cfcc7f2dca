#include "lockstep/rpc/agent.h"

#include <limits>
#include <random>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/internal/farewell.h"
#include "lockstep/rpc/internal/pool.h"
#include "lockstep/rpc/internal/roster.h"
#include "lockstep/rpc/rref_scope.h"

namespace lockstep::rpc {
namespace {

constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();
// Answers and control messages do not wait for ever for a connection.
constexpr Milliseconds kConnect{30'000};

// The resident looks for calls whose time is over after so many messages at the latest.
constexpr int kLooksAtClock = 64;
// About what it costs to wake another thread.
constexpr std::int64_t kWorthSharingNs = 20'000;

struct Services {
  std::mutex mutex;
  std::vector<MakeService> makers;
};
Services& services() {
  static Services list;
  return list;
}

courier::Message make_message(std::uint8_t kind, std::uint64_t id, Payload payload) {
  return {.kind = kind,
          .id = id,
          .body = courier::owned_blob(std::move(payload.body)),
          .blobs = std::move(payload.blobs)};
}

std::uint64_t first_id() {
  std::random_device random;
  return ((std::uint64_t{random()} << 32 | random()) >> 18) + 1;
}

}  // namespace

bool register_service(MakeService make) {
  const std::lock_guard lock(services().mutex);
  services().makers.push_back(make);
  return true;
}

CallScope& this_call() {
  thread_local CallScope scope;
  return scope;
}

std::shared_ptr<Agent> Agent::start(AgentOptions options, std::unique_ptr<courier::Courier> courier) {
  std::shared_ptr<Agent> agent(new Agent(std::move(options), std::move(courier)));
  {
    const std::lock_guard lock(services().mutex);
    agent->handle(Kind::kCall, internal::serve_call);
    agent->services_.push_back(make_rref_service(*agent));
    agent->services_.push_back(std::make_unique<internal::Gatherings>(*agent));
    agent->services_.push_back(std::make_unique<internal::Farewell>(*agent));
    for (const MakeService make : services().makers) agent->services_.push_back(make(*agent));
  }
  agent->pool_ = std::make_unique<internal::Pool>(
      internal::Pool::Duties{.step = [self = agent.get()] { return self->step(Lane::kResident); },
                             .rest = [self = agent.get()] { self->rest(); },
                             .wake = [self = agent.get()] { self->courier_->wake(); }},
      internal::Pool::Options{.n_threads = agent->options_.num_worker_threads, .rank = agent->options_.rank});
  agent->pool_->start();
  return agent;
}

Agent::Agent(AgentOptions options, std::unique_ptr<courier::Courier> courier)
    : options_(std::move(options)),
      courier_(std::move(courier)),
      roster_(std::make_unique<internal::Roster>()),
      rpc_timeout_ms_(options_.rpc_timeout.count()),
      next_id_(first_id()),
      earliest_ns_(kNeverNs) {
  roster_->add(options_.self);
}

Agent::~Agent() {
  try {
    close(Milliseconds(0));
  } catch (...) {
    log(LogLevel::kError, "an RPC agent could not be closed: " + current_failure().message);
  }
}

Milliseconds Agent::rpc_timeout() const {
  return Milliseconds(rpc_timeout_ms_.load());
}

void Agent::set_rpc_timeout(Milliseconds timeout) {
  if (timeout.count() < 0) raise(ErrorKind::kUsage, "an RPC timeout is zero (none) or more");
  rpc_timeout_ms_ = timeout.count();
}

void Agent::add_worker(const WorkerInfo& info, const Bytes& address) {
  if (info.id == options_.self.id) return;
  roster_->add(info);
  for (const auto& service : services_) service->on_joined(info.id);
  courier_->add_peer(info.id, info.name, address);
}

void Agent::remove_worker(WorkerId id, const std::string& cause) {
  // Also of one that is gone already: a courier that never reached it may not know, and its number may come back.
  courier_->remove_peer(id);
  if (roster_->present(id)) take_loss(id, cause, true);
}

WorkerInfo Agent::find(const Worker& worker) const {
  return roster_->find(worker);
}
WorkerInfo Agent::info(WorkerId id) const {
  return roster_->info(id);
}
std::vector<WorkerInfo> Agent::workers() const {
  return roster_->present();
}
std::vector<WorkerId> Agent::gone() const {
  return roster_->gone();
}

void Agent::handle(Kind kind, Handler handler, Runs runs) {
  handlers_.at(static_cast<std::size_t>(kind)) = {.handler = std::move(handler), .runs = runs};
}

void Agent::no_service() {
  raise(ErrorKind::kUnsupported,
        "this program has no distributed autograd: include lockstep/autograd/autograd.h (or "
        "lockstep/lockstep.h)");
}

// Sending.

void Agent::request(WorkerId to, Kind kind, Payload payload, Milliseconds timeout, const std::string& what,
                    OnAnswer on_answer) {
  if (timeout.count() < 0) timeout = rpc_timeout();
  const Deadline deadline = Deadline::after(timeout);
  const std::uint64_t id = new_id();
  const auto cargo = std::move(payload.cargo);
  std::optional<Failure> failure;
  {
    const std::lock_guard lock(mutex_);
    if (closed()) {
      failure = Failure{.kind = ErrorKind::kAborted, .message = cat(what, ": the RPC agent was shut down")};
    } else {
      pending_.emplace(
          id,
          Pending{.on_answer = on_answer, .to = to, .deadline = deadline, .timeout = timeout, .what = what});
    }
  }
  if (!failure) {
    note_deadline(deadline);
    failure = courier_->send(to, make_message(static_cast<std::uint8_t>(kind), id, std::move(payload)),
                             timeout.count() == 0 ? Deadline::after(kConnect) : deadline);
    if (!failure) {
      if (cargo) cargo->sent();
      return;
    }
    if (!take_pending(id)) return;  // the loss was told to it
    if (failure->kind == ErrorKind::kPeerLost) {
      note_unreachable(to, *failure);
      failure = roster_->lost(to, what);
    }
  }
  const CallFailure value{.failure = std::move(*failure)};
  on_answer(nullptr, &value);
}

Future<Agent::Answer> Agent::request(WorkerId to, Kind kind, Payload payload, Milliseconds timeout,
                                     const std::string& what) {
  Promise<Answer> promise(weak_from_this());
  request(to, kind, std::move(payload), timeout, what,
          [weak = weak_from_this(), promise](Answer* answer, const CallFailure* failure) {
            auto callbacks = answer != nullptr ? promise.state()->set(std::move(*answer))
                                               : promise.state()->fail(*failure);
            if (const auto agent = weak.lock()) {
              agent->run_callbacks(std::move(callbacks));
            } else {
              internal::FutureBase::run(std::move(callbacks));
            }
          });
  return promise.future();
}

// A worker that died before anything was sent to it has no connection whose end could tell.
void Agent::note_unreachable(WorkerId to, const Failure& failure) {
  const std::uint64_t stay = roster_->stay(to);
  if (stay == 0 || closed()) return;
  const std::string cause = failure.peer ? failure.peer->cause : failure.message;
  run([this, to, cause, stay] { take_loss(to, cause, false, stay); });
}

void Agent::note_deadline(Deadline deadline) {
  const std::int64_t ns = deadline.monotonic_ns();
  std::int64_t earliest = earliest_ns_.load();
  while (ns < earliest && !earliest_ns_.compare_exchange_weak(earliest, ns)) {
  }
  if (ns < earliest) courier_->wake();  // the resident sleeps for too long
}

std::optional<Agent::Pending> Agent::take_pending(std::uint64_t id, std::optional<WorkerId> from) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(id);
  if (found == pending_.end() || (from && found->second.to != *from)) return std::nullopt;
  std::optional<Pending> pending = std::move(found->second);
  pending_.erase(found);
  return pending;
}

std::vector<Agent::Pending> Agent::take_all(const std::function<bool(const Pending&)>& which) {
  std::vector<Pending> taken;
  const std::lock_guard lock(mutex_);
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
    pending.on_answer(nullptr, &failure);
  }
}

void Agent::expire() {
  const std::int64_t now = Deadline::now().monotonic_ns();
  if (earliest_ns_.load() > now) return;
  std::int64_t next = kNeverNs;
  earliest_ns_ = kNeverNs;  // calls that come meanwhile lower it again
  const auto late = take_all([&](const Pending& pending) {
    if (pending.deadline.monotonic_ns() <= now) return true;
    next = std::min(next, pending.deadline.monotonic_ns());
    return false;
  });
  // Before callbacks run: they may last, and then another thread is resident.
  std::int64_t earliest = earliest_ns_.load();
  while (next < earliest && !earliest_ns_.compare_exchange_weak(earliest, next)) {
  }
  if (late.empty()) return;
  pool_->linger([&] {
    for (const auto& pending : late) {
      const CallFailure failure{.failure = timeout_failure(pending.what, pending.timeout)};
      pending.on_answer(nullptr, &failure);
    }
  });
}

// Receiving.

bool Agent::step(Lane lane) {
  if (lane == Lane::kResident &&
      n_in_row_.load(std::memory_order_relaxed) % kLooksAtClock == kLooksAtClock - 1) {
    expire();  // also while messages never end
    if (!pool_->resident_here()) return true;
  }
  auto event = courier_->poll();
  if (!event) {
    if (lane == Lane::kResident) {
      n_in_row_.store(0, std::memory_order_relaxed);
      expire();
    }
    return false;
  }
  if (lane == Lane::kResident) n_in_row_.fetch_add(1, std::memory_order_relaxed);
  take(std::move(*event), lane);
  return true;
}

void Agent::rest() {
  expire();
  if (!pool_->resident_here()) return;
  courier_->wait(Deadline::from_monotonic_ns(earliest_ns_.load()));
  expire();
}

void Agent::take(courier::Event event, Lane lane) {
  if (event.what == courier::Event::What::kLost) {
    const std::uint64_t stay = roster_->stay(event.from);
    if (stay == 0) return;
    const auto tell = [this, from = event.from, cause = std::move(event.cause), stay] {
      take_loss(from, cause, false, stay);
    };
    if (lane == Lane::kResident) {
      pool_->linger(tell);
    } else {
      run(tell);
    }
    return;
  }
  if ((event.message.kind & kAnswer) == 0) {
    take_request(event.from, std::move(event.message), lane);
  } else if (lane == Lane::kResident) {
    pool_->linger([&] { take_answer(event.from, std::move(event.message)); });
  } else {
    take_answer(event.from, std::move(event.message));
  }
}

void Agent::take_answer(WorkerId from, courier::Message message) {
  // An answer to nobody: its call timed out. Or to a call to another worker, which nobody in order sends.
  const auto pending = take_pending(message.id, from);
  if (!pending) {
    internal::discard_rrefs(*this, from, message);
    return;
  }
  if (message.kind == kException) {
    const CallFailure failure = decode_failure(roster_->info(from), message.body.bytes);
    pending->on_answer(nullptr, &failure);
  } else {
    Answer answer{.body = std::move(message.body), .blobs = std::move(message.blobs)};
    pending->on_answer(&answer, nullptr);
  }
}

void Agent::take_request(WorkerId from, courier::Message message, Lane lane) {
  const auto self = weak_from_this().lock();
  if (!self) return;  // on its way out
  const std::size_t kind = message.kind;
  const bool known = kind < handlers_.size() && handlers_[kind].handler;
  if (!known) internal::discard_rrefs(*this, from, message);
  Request request(self, from, std::move(message));
  if (!known) {
    request.answer_failure(
        {.failure = {.kind = ErrorKind::kUnsupported,
                     .message = cat("this worker's program cannot answer messages of kind ", kind)}});
    return;
  }
  const auto& entry = handlers_[kind];
  n_running_.fetch_add(1);
  if (entry.runs == Runs::kQuick || (entry.runs == Runs::kEither && lane == Lane::kHelper)) {
    run_handler(entry, std::move(request));
  } else if (lane == Lane::kResident && !worth_sharing()) {
    pool_->linger([&] { run_handler(entry, std::move(request)); });
  } else {
    // A task is copied nowhere, but std::function wants to be able to.
    auto shared = std::make_shared<Request>(std::move(request));
    pool_->post([this, &entry, shared] { run_handler(entry, std::move(*shared)); });
  }
}

// Requests come faster than one thread works them off, and handing one over costs less than running it.
bool Agent::worth_sharing() const {
  return n_in_row_.load(std::memory_order_relaxed) > 1 &&
         typical_ns_.load(std::memory_order_relaxed) > kWorthSharingNs;
}

// About the median: one that was held up, or was put off its core, moves it little.
void Agent::note_duration(std::int64_t ns) {
  const auto typical = typical_ns_.load(std::memory_order_relaxed);
  typical_ns_.store(typical + std::min<std::int64_t>((ns - typical) / 8, kWorthSharingNs / 16),
                    std::memory_order_relaxed);
}

void Agent::run_handler(const HandlerEntry& entry, Request request) noexcept {
  const std::int64_t start = Deadline::now().monotonic_ns();
  try {
    entry.handler(std::move(request));
  } catch (...) {
    // Handlers answer their own exceptions; the request is answered by its destructor.
    log(LogLevel::kError, "an RPC handler threw: " + current_failure().message);
  }
  if (entry.runs == Runs::kInThread) note_duration(Deadline::now().monotonic_ns() - start);
  n_running_.fetch_sub(1);
}

void Agent::take_loss(WorkerId peer, const std::string& cause, bool orderly, std::uint64_t stay) {
  if (!roster_->end(peer, cause, stay)) return;
  if (!orderly && !ends_expected_)
    log(LogLevel::kWarn, cat("worker ", roster_->info(peer).name, " is gone: ", cause));
  for (const auto& service : services_) {
    try {
      service->on_lost(peer, cause);
    } catch (...) {
      log(LogLevel::kError, "after the loss of a worker: " + current_failure().message);
    }
  }
  fail_pending([peer](const Pending& pending) { return pending.to == peer; },
               [&](const Pending& pending) { return roster_->lost(peer, pending.what); });
}

std::optional<Failure> Agent::send_answer(WorkerId to, courier::Message message) noexcept {
  auto failure = courier_->send(to, std::move(message), Deadline::after(kConnect));
  if (failure && failure->kind != ErrorKind::kPeerLost && !closed()) {
    log(LogLevel::kWarn,
        cat("an answer to worker ", roster_->info(to).name, " was not sent: ", failure->message));
  }
  return failure;
}

// Threads.

void Agent::run(std::function<void()> task) {
  pool_->post(std::move(task));
}

void Agent::run_callbacks(std::vector<internal::FutureBase::Callback> callbacks) {
  if (callbacks.empty()) return;
  if (pool_->is_mine() && !helping()) {
    internal::FutureBase::run(std::move(callbacks));
  } else {
    // Whatever happens to the task: futures that hang on these callbacks must end.
    struct Surely {
      ~Surely() { internal::FutureBase::run(std::move(callbacks)); }
      std::vector<internal::FutureBase::Callback> callbacks;
    };
    auto shared = std::make_shared<Surely>();
    shared->callbacks = std::move(callbacks);
    run([shared] { internal::FutureBase::run(std::exchange(shared->callbacks, {})); });
  }
}

std::size_t Agent::n_waiting() const {
  const std::lock_guard lock(mutex_);
  return pending_.size();
}

std::size_t Agent::n_running() const {
  return n_running_.load();
}

std::map<std::string, std::string> Agent::debug_info() const {
  std::map<std::string, std::string> info;
  info["agent.num_pending_requests"] = std::to_string(n_waiting());
  info["agent.thread_pool_size"] = std::to_string(pool_->n_threads());
  info["agent.num_idle_threads"] = std::to_string(pool_->n_idle());
  info["agent.client_active_calls"] = std::to_string(n_waiting());
  info["agent.server_active_calls"] = std::to_string(n_running());
  info["agent.num_workers"] = std::to_string(workers().size());
  for (const auto& service : services_) service->debug_info(info);
  return info;
}

bool Agent::on_own_thread() const {
  return pool_ && pool_->is_mine();
}

void Agent::close(Milliseconds flush) {
  if (on_own_thread()) {
    raise(ErrorKind::kUsage, "an RPC agent cannot be shut down by one of its own threads");
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_.exchange(true)) return;
  }
  for (const auto& service : services_) service->on_close();
  fail_pending([](const Pending&) { return true; },
               [](const Pending& pending) {
                 return Failure{.kind = ErrorKind::kAborted,
                                .message = cat(pending.what, ": the RPC agent was shut down")};
               });
  if (pool_) pool_->stop();
  for (const auto& service : services_) service->on_closed();
  courier_->close(flush.count() == 0 ? Deadline::now() : Deadline::after(flush));
}

}  // namespace lockstep::rpc
