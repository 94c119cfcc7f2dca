// What comes to an agent: answers, requests of others, the loss of workers; and the threads that fetch it.
#include <sched.h>

#include <chrono>
#include <thread>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/detail/rref_scope.h"
#include "lockstep/rpc/internal/pool.h"
#include "lockstep/rpc/internal/worker_directory.h"

namespace lockstep::rpc {
namespace {

// The poller looks for calls whose time is over after so many messages at the latest.
constexpr int kLooksAtClock = 64;
// About what it costs to wake another thread.
constexpr std::int64_t kWorthSharingNs = 20'000;
// How long a thread that waits for an answer fetches messages itself.
constexpr auto kHelp = std::chrono::microseconds(100);
// After a failure of the agent's own, most likely for want of memory: the next look may fail likewise, and
// must not be a busy loop.
constexpr Milliseconds kRecover{1};
// Answers do not wait for ever for a connection.
constexpr Milliseconds kConnectToAnswer{30'000};

thread_local int n_helping = 0;

}  // namespace

bool Agent::helping() {
  return n_helping != 0;
}

void Agent::help(const std::atomic<std::uint8_t>& over) {
  if (closed()) return;
  transport_->begin_polling();
  ++n_helping;
  const auto until = std::chrono::steady_clock::now() + kHelp;
  do {
    for (int i = 0; i < 8 && over.load(std::memory_order_acquire) == 0; ++i) {
      if (!step(Taker::kHelper)) ::sched_yield();
    }
  } while (over.load(std::memory_order_acquire) == 0 && std::chrono::steady_clock::now() < until &&
           !closed());
  --n_helping;
  transport_->end_polling();
}

bool Agent::step(Taker taker) noexcept {
  try {
    return take_next(taker);
  } catch (...) {
    log_current_failure("an RPC agent could not process a message");
    std::this_thread::sleep_for(kRecover);
    return true;
  }
}

// Two kinds of threads take messages. The poller (kPoller) runs what it finds in place, inside run_long, so
// that it is replaced when that lasts. A thread inside Future::wait (kHelper) may hold locks of the program:
// it runs only what never blocks there (kQuick, kEither), ends calls, whose callbacks go to the pool, and
// posts everything else.
bool Agent::take_next(Taker taker) {
  if (taker == Taker::kPoller &&
      n_in_row_.load(std::memory_order_relaxed) % kLooksAtClock == kLooksAtClock - 1) {
    expire();  // also while messages never end
    if (!pool_->poller_here()) return true;
  }
  auto event = transport_->poll();
  if (!event) {
    if (taker == Taker::kPoller) {
      n_in_row_.store(0, std::memory_order_relaxed);
      expire();
    }
    return false;
  }
  if (taker == Taker::kPoller) n_in_row_.fetch_add(1, std::memory_order_relaxed);
  take(std::move(*event), taker);
  return true;
}

void Agent::rest() noexcept {
  try {
    expire();
    if (!pool_->poller_here()) return;
    transport_->wait(Deadline::from_monotonic_ns(earliest_ns_.load()));
    expire();
  } catch (...) {
    log_current_failure("an RPC agent could not wait");
    std::this_thread::sleep_for(kRecover);
  }
}

void Agent::take(transport::Event event, Taker taker) {
  if (event.what == transport::Event::What::kLost) {
    const std::uint64_t incarnation = directory_->incarnation(event.from);
    if (incarnation == 0) return;
    const auto tell = [this, from = event.from, cause = std::move(event.cause), incarnation] {
      take_loss(from, cause, false, incarnation);
    };
    if (taker == Taker::kPoller) {
      pool_->run_long(tell);
    } else {
      run(tell);
    }
    return;
  }
  // Its request may run before add_worker() has returned, and call it back.
  if (n_joining_.load(std::memory_order_acquire) != 0) directory_->list(event.from);
  if ((event.message.kind & kAnswer) == 0) {
    take_request(event.from, std::move(event.message), taker);
  } else if (taker == Taker::kPoller) {
    pool_->run_long([&] { take_answer(event.from, std::move(event.message)); });
  } else {
    take_answer(event.from, std::move(event.message));
  }
}

void Agent::take_answer(WorkerId from, transport::Message message) {
  // Not pending: its call timed out. Or it was a call to another worker, and no correct worker answers that.
  const auto pending = take_pending(message.id, from);
  if (!pending) {
    internal::discard_rrefs(*this, from, message);
    return;
  }
  if (message.kind == kException) {
    const CallFailure failure = decode_failure(directory_->info(from), message.body.bytes);
    end_call(*pending, nullptr, &failure);
  } else {
    Answer answer{.body = std::move(message.body), .blobs = std::move(message.blobs)};
    end_call(*pending, &answer, nullptr);
  }
}

void Agent::end_call(const Pending& pending, Answer* answer, const CallFailure* failure) noexcept {
  try {
    pending.on_answer(answer, failure);
    return;
  } catch (...) {
    log_current_failure("what takes an RPC answer threw");
    if (answer == nullptr) return;
    try {
      const CallFailure thrown = current_call_failure();
      pending.on_answer(nullptr, &thrown);
    } catch (...) {
      log_current_failure("what takes an RPC answer threw again");
    }
  }
}

void Agent::take_request(WorkerId from, transport::Message message, Taker taker) {
  const auto self = weak_from_this().lock();
  if (!self) return;  // on its way out
  const std::size_t kind = message.kind;
  const bool known = kind < handlers_.size() && handlers_[kind].handler;
  if (!known) internal::discard_rrefs(*this, from, message);
  Request request(self, from, std::move(message));
  if (!known) {
    request.answer_failure(
        {.failure = {.kind = ErrorKind::kUnsupported,
                     .message = base::cat("this worker's program cannot answer messages of kind ", kind)}});
    return;
  }
  const auto& entry = handlers_[kind];
  n_running_.fetch_add(1);
  if (entry.runs == Runs::kQuick || (entry.runs == Runs::kEither && taker == Taker::kHelper)) {
    run_handler(entry, std::move(request));
  } else if (taker == Taker::kPoller && !worth_sharing()) {
    pool_->run_long([&] { run_handler(entry, std::move(request)); });
  } else {
    try {
      // A task is never copied, but std::function requires that it can be.
      auto shared = std::make_shared<Request>(std::move(request));
      pool_->post([this, &entry, shared] { run_handler(entry, std::move(*shared)); });
    } catch (...) {
      n_running_.fetch_sub(1);
      throw;  // the request is dropped, which answers it
    }
  }
}

// Requests arrive faster than one thread runs them, and handing one over costs less than running it. Both
// counters are relaxed: they steer, nothing depends on them.
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
    log_current_failure("an RPC handler threw");
  }
  if (entry.runs == Runs::kInThread) note_duration(Deadline::now().monotonic_ns() - start);
  n_running_.fetch_sub(1);
}

// In this order: the directory, so that new calls to it are refused; the services, so that a callback of a
// failed call finds the loss known; then the calls. `incarnation` keeps a late report of a worker's end from
// ending the next one with its number.
void Agent::take_loss(WorkerId peer, const std::string& cause, bool orderly, std::uint64_t incarnation) {
  if (!directory_->end(peer, cause, incarnation)) return;
  if (!orderly && !ends_expected_)
    base::log(LogLevel::kWarn, base::cat("worker ", directory_->info(peer).name, " is gone: ", cause));
  for (const auto& service : services_) {
    try {
      service->on_lost(peer, cause);
    } catch (...) {
      log_current_failure("after the loss of a worker");
    }
  }
  fail_pending([peer](const Pending& pending) { return pending.to == peer; },
               [&](const Pending& pending) { return directory_->lost(peer, pending.what); });
}

std::optional<Failure> Agent::send_answer(WorkerId to, transport::Message message) noexcept {
  auto failure = transport_->send(to, std::move(message), Deadline::after(kConnectToAnswer));
  if (failure && failure->kind != ErrorKind::kPeerLost && !closed()) {
    base::log(LogLevel::kWarn, base::cat("an answer to worker ", directory_->info(to).name,
                                         " was not sent: ", failure->message));
  }
  return failure;
}

}  // namespace lockstep::rpc
