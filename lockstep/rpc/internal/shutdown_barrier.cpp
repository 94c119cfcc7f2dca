#include "lockstep/rpc/internal/shutdown_barrier.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::rpc::internal {
namespace {

Payload round_payload(std::uint32_t round) {
  base::ByteWriter writer;
  writer.put(round);
  return {.body = writer.take()};
}

// How long a worker whose time is over waits for the list of those that were late.
constexpr Milliseconds kAskWhoIsLate{500};

}  // namespace

Future<Agent::Answer> ping(Agent& agent, WorkerId worker, Milliseconds timeout) {
  return agent.request(worker, MessageKind::kLeave, round_payload(0), timeout, "a ping");
}

ShutdownBarrier::ShutdownBarrier(Agent& agent) : agent_(agent) {
  agent.handle(
      MessageKind::kLeave, [this](Request request) { take(std::move(request)); }, Agent::Runs::kQuick);
}

// One round at one leader, the worker present with the smallest name. A leader that dies or leaves is
// replaced by the next name; a round that was reached stays reached (reached_ only grows), so asking again is
// harmless.
void ShutdownBarrier::meet(std::uint32_t round, Deadline deadline) {
  for (;;) {
    const auto workers = agent_.workers();
    const auto leader = std::ranges::min(workers, {}, &WorkerInfo::name);
    try {
      const auto left =
          deadline.is_never()
              ? kNoTimeout
              : std::max(Milliseconds(1), std::chrono::duration_cast<Milliseconds>(deadline.remaining()));
      const std::string what =
          base::cat("shutdown of ", agent_.self().name, ", which waits for all ", workers.size(), " workers");
      const auto all = agent_.request(leader.id, MessageKind::kLeave, round_payload(round), left, what);
      all.state()->wait_over(deadline, [&] { return what + ask_missing(leader, round); });
      all.wait();  // until the request has noticed that its time is over, too
      return;
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) {
        Failure failure = error.failure();
        failure.message += ask_missing(leader, round);
        base::raise(std::move(failure));
      }
      // The leader died (kPeerLost), or left without waiting for the others, which drops the requests it
      // holds (kAborted): the next one is asked.
      const bool leaderless = error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kAborted;
      if (!leaderless || agent_.closed() || deadline.expired()) throw;
      std::this_thread::sleep_for(Milliseconds(1));  // until it is off the list
    }
  }
}

std::string ShutdownBarrier::ask_missing(const WorkerInfo& leader, std::uint32_t round) {
  try {
    base::ByteWriter writer;
    writer.put(std::uint32_t{0}).put(round);
    const auto answer = agent_
                            .request(leader.id, MessageKind::kLeave, {.body = writer.take()}, kAskWhoIsLate,
                                     "who has not arrived")
                            .wait();
    const auto names = decode<std::vector<std::string>>(answer.body.bytes);
    std::string list;
    for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
    return names.empty() ? "; all have arrived by now" : "; these have not arrived: " + list;
  } catch (const Error&) {
    return base::cat("; ", leader.name, ", which leads it, does not answer");
  }
}

Bytes ShutdownBarrier::missing(std::uint32_t round) {
  std::vector<std::string> names;
  const auto workers = agent_.workers();
  const base::MutexLock lock(mutex_);
  for (const auto& worker : workers) {
    const auto found = reached_.find(worker.id);
    if (found == reached_.end() || found->second < round) names.push_back(worker.name);
  }
  return encode(names);
}

// Every worker may be asked to lead, also one that does not think it is the leader: lists of who is present
// differ for a moment after a death. It then holds the request until its own list says that all have entered.
void ShutdownBarrier::take(Request request) {
  base::ByteReader reader(request.body());
  const auto round = reader.get<std::uint32_t>();
  if (!round || *round == 0) {  // a ping, or who has not arrived at a round
    const auto asked = reader.get<std::uint32_t>();
    request.answer(asked ? Payload{.body = missing(*asked)} : Payload{});
    return;
  }
  bool first = false;
  {
    const base::MutexLock lock(mutex_);
    auto& reached = reached_[request.from()];
    reached = std::max(reached, *round);
    waiting_.push_back({.round = *round, .request = std::move(request)});
    first = !std::exchange(pinged_, true);
  }
  if (first) ping_all();
  look();
}

// The answers do not matter: sending makes the transport notice a death that nobody has noticed yet.
void ShutdownBarrier::ping_all() {
  for (const auto& worker : agent_.workers()) {
    if (worker.id == agent_.self().id) continue;
    agent_.request(worker.id, MessageKind::kLeave, round_payload(0), kNoTimeout, "a ping before shutdown",
                   [](Agent::Answer*, const CallFailure*) {});
  }
}

// Answered outside the lock and by whoever notices; splice() moves a request out, so it is answered once.
void ShutdownBarrier::look() {
  std::list<Waiting> over;
  const auto workers = agent_.workers();
  {
    const base::MutexLock lock(mutex_);
    std::uint32_t all_reached = UINT32_MAX;
    for (const auto& worker : workers) {
      const auto found = reached_.find(worker.id);
      all_reached = std::min(all_reached, found == reached_.end() ? 0 : found->second);
    }
    for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
      const auto next = std::next(waiting);
      if (waiting->round <= all_reached) over.splice(over.end(), waiting_, waiting);
      waiting = next;
    }
  }
  for (auto& waiting : over) waiting.request.answer({});  // without the lock: sending takes time
}

void ShutdownBarrier::debug_info(std::map<std::string, std::string>& info) {
  const base::MutexLock lock(mutex_);
  info["agent.num_leaving"] = std::to_string(reached_.size());
}

void ShutdownBarrier::on_lost(WorkerId, const std::string&) {
  look();
}

// Requests that are dropped are answered with kAborted by their destructors, outside the lock: `waiting` is
// declared before it.
void ShutdownBarrier::on_close() {
  std::list<Waiting> waiting;
  const base::MutexLock lock(mutex_);
  waiting.swap(waiting_);
}

}  // namespace lockstep::rpc::internal
