#include <sched.h>

#include <chrono>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/thread.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/internal/pool.h"

namespace lockstep::rpc {
namespace {

// How long a thread that waits for an answer fetches messages itself.
constexpr auto kHelp = std::chrono::microseconds(100);
// Of request_again.
constexpr Milliseconds kFirstPause{1000};
constexpr double kGrowth = 1.5;

thread_local int n_helping = 0;

struct Retry {
  std::weak_ptr<Agent> agent;
  WorkerId to;
  Kind kind;
  Payload payload;
  std::string what;
  int n_left;
  Milliseconds pause;
  Promise<Agent::Answer> promise;
};

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

Request::Request(std::shared_ptr<Agent> agent, WorkerId from, courier::Message message)
    : agent_(std::move(agent)), from_(from), message_(std::move(message)) {}

Request::Request(Request&&) noexcept = default;

Request::~Request() {
  if (!agent_) return;
  answer_failure(
      {.failure = {.kind = ErrorKind::kAborted, .message = "the request was dropped without an answer"}});
}

void Request::answer(Payload payload) {
  const auto agent = std::move(agent_);
  const auto failure = agent->send_answer(from_, {.kind = static_cast<std::uint8_t>(message_.kind | kAnswer),
                                                  .id = message_.id,
                                                  .body = courier::owned_blob(std::move(payload.body)),
                                                  .blobs = std::move(payload.blobs)});
  if (!failure) {
    if (payload.cargo) payload.cargo->sent();
    return;
  }
  if (failure->kind == ErrorKind::kPeerLost || failure->kind == ErrorKind::kAborted) return;
  // Too long, or no memory for it: the caller should not have to wait for its timeout.
  agent->send_answer(from_, {.kind = kException,
                             .id = message_.id,
                             .body = courier::owned_blob(encode_failure({.failure = *failure}))});
}

void Request::answer_failure(const CallFailure& failure) noexcept {
  const auto agent = std::move(agent_);
  if (!agent) return;
  agent->send_answer(
      from_, {.kind = kException, .id = message_.id, .body = courier::owned_blob(encode_failure(failure))});
}

bool Agent::helping() {
  return n_helping != 0;
}

void Agent::help(const std::atomic<std::uint8_t>& over) {
  if (closed()) return;
  courier_->begin_polling();
  ++n_helping;
  const auto until = std::chrono::steady_clock::now() + kHelp;
  do {
    for (int i = 0; i < 8 && over.load(std::memory_order_acquire) == 0; ++i) {
      if (!step(Lane::kHelper)) ::sched_yield();
    }
  } while (over.load(std::memory_order_acquire) == 0 && std::chrono::steady_clock::now() < until &&
           !closed());
  --n_helping;
  courier_->end_polling();
}

Future<Agent::Answer> Agent::request_again(WorkerId to, Kind kind, Payload payload, const std::string& what,
                                           int n_tries) {
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

void Agent::before_sleep() {
  pool_->before_sleep();
}
void Agent::after_sleep() {
  pool_->after_sleep();
}

}  // namespace lockstep::rpc
