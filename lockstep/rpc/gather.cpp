#include "lockstep/rpc/gather.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::rpc {
namespace internal {
namespace {

// What a worker brings. A gathering is identified by the set of names and its number among the gatherings of
// that set:
//
//   worker:  kGather(names, number, own value) to the leader, the smallest name --> waits for the answer
//   leader:  keeps requests and values per (names, number) --> the last to come answers all with all values
//
// Requests are held, not answered: no thread of the leader waits. A worker that is lost ends the gatherings
// that still wait for it, on the leader; the loss of the leader fails the requests of the others.
struct GatherRecord {
  std::set<std::string> names;
  std::uint64_t number = 0;
  std::string name;
  Object value;
};
auto lockstep_fields(SelfOf<GatherRecord> auto& self) {
  return fields({.name = "lockstep.rpc.Gather", .version = 1}, self.names, self.number, self.name,
                self.value);
}

// Of a caller whose time is over.
struct MissingRecord {
  std::set<std::string> names;
  std::uint64_t number = 0;
};
auto lockstep_fields(SelfOf<MissingRecord> auto& self) {
  return fields({.name = "lockstep.rpc.GatherMissing", .version = 1}, self.names, self.number);
}

// Short: the caller's own time is over already, and the names only improve its message.
constexpr Milliseconds kAskMissing{500};

std::vector<std::string> missing(const std::set<std::string>& names,
                                 const std::map<std::string, Object>& values) {
  std::vector<std::string> list;
  for (const auto& name : names) {
    if (!values.contains(name)) list.push_back(name);
  }
  return list;
}

std::string joined(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

}  // namespace

Gatherings::Gatherings(Agent& agent) : agent_(agent) {
  agent.handle(
      MessageKind::kGather, [this](Request request) { take(std::move(request)); }, Agent::Runs::kQuick);
  agent.handle(
      MessageKind::kGatherMissing, [this](Request request) { tell_missing(std::move(request)); },
      Agent::Runs::kQuick);
}

std::map<std::string, Object> Gatherings::gather(const Object& value, std::vector<std::string> list,
                                                 Milliseconds timeout) {
  std::set<std::string> names(list.begin(), list.end());
  if (names.empty()) {
    for (const auto& worker : agent_.workers()) names.insert(worker.name);
  }
  if (!names.contains(agent_.self().name)) {
    base::raise(ErrorKind::kUsage,
                base::cat("a gathering must include the worker that calls it: ", agent_.self().name,
                          " is not among ", joined({names.begin(), names.end()})));
  }
  std::uint64_t number = 0;
  {
    const base::MutexLock lock(mutex_);
    // Workers that gather the same set of names in the same order match by this number; they need not agree
    // on anything else.
    number = n_calls_[names]++;
  }
  // Sets are ordered, so every member finds the same leader without asking.
  const WorkerInfo leader = agent_.find(*names.begin());
  const auto call =
      agent_.request(leader.id, MessageKind::kGather,
                     {.body = encode(GatherRecord{
                          .names = names, .number = number, .name = agent_.self().name, .value = value})},
                     timeout, base::cat("a gathering of ", names.size(), " workers led by ", leader.name));
  try {
    call.state()->wait_over(Deadline::never(), [&] {
      return base::cat("worker ", agent_.self().name, " waits in a gathering of ", names.size(), " workers",
                       ask_missing(leader, {names, number}));
    });
    const auto answer = call.result();
    return decode<std::map<std::string, Object>>(answer.body.bytes, answer.blobs);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    Failure failure = error.failure();
    failure.message += ask_missing(leader, {names, number});
    base::raise(std::move(failure));
  }
}

std::string Gatherings::ask_missing(const WorkerInfo& leader, const Key& key) {
  try {
    const auto answer =
        agent_
            .request(leader.id, MessageKind::kGatherMissing,
                     {.body = encode(MissingRecord{.names = key.first, .number = key.second})}, kAskMissing,
                     "who has not arrived")
            .wait();
    const auto names = decode<std::vector<std::string>>(answer.body.bytes, answer.blobs);
    return names.empty() ? "; all have arrived by now"
                         : base::cat("; these have not arrived: ", joined(names));
  } catch (const Error&) {
    return base::cat("; ", leader.name, ", which leads it, does not answer");
  }
}

void Gatherings::tell_missing(Request request) {
  try {
    const auto record = decode<MissingRecord>(request.body());
    std::vector<std::string> names;
    {
      const base::MutexLock lock(mutex_);
      const auto found = open_.find({record.names, record.number});
      if (found != open_.end()) names = missing(record.names, found->second.values);
    }
    request.answer({.body = encode(names)});
  } catch (...) {
    request.answer_failure(current_call_failure());
  }
}

void Gatherings::debug_info(std::map<std::string, std::string>& info) {
  std::size_t n_waiting = 0;
  const base::MutexLock lock(mutex_);
  for (const auto& [key, gathering] : open_) n_waiting += gathering.requests.size();
  info["agent.num_waiting_in_gatherings"] = std::to_string(n_waiting);
}

// On the leader. The last one to arrive answers all, outside the lock.
void Gatherings::take(Request request) {
  GatherRecord record;
  Gathering over;
  std::optional<Failure> gone;
  try {
    record = decode<GatherRecord>(request.body());
    const base::MutexLock lock(mutex_);
    auto& gathering = open_[{record.names, record.number}];
    gathering.values[record.name] = std::move(record.value);
    gathering.requests.push_back(std::move(request));
    gone = gone_among(record.names, gathering.values);
    if (!gone && gathering.values.size() < record.names.size()) return;
    over = std::move(gathering);
    open_.erase({record.names, record.number});
  } catch (...) {
    request.answer_failure(current_call_failure());
    return;
  }
  if (gone) {
    for (auto& waiting : over.requests) waiting.answer_failure({.failure = *gone});
    return;
  }
  // Encoded once, sent to everyone.
  const Bytes all = encode(over.values);
  for (auto& waiting : over.requests) waiting.answer({.body = all});
}

// One that has not come and never will.
std::optional<Failure> Gatherings::gone_among(const std::set<std::string>& names,
                                              const std::map<std::string, Object>& values) const {
  for (const auto& name : names) {
    if (values.contains(name)) continue;
    try {
      agent_.find(name);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerLost) return error.failure();
    }
  }
  return std::nullopt;
}

void Gatherings::on_joined(WorkerId peer) {
  const std::string name = agent_.info(peer).name;
  const base::MutexLock lock(mutex_);
  // It counts from the beginning, and so must those who meet it.
  std::erase_if(n_calls_, [&](const auto& entry) { return entry.first.contains(name); });
}

// Requests are answered outside the lock: sending takes time, and may notice the next loss.
void Gatherings::on_lost(WorkerId peer, const std::string& cause) {
  std::vector<std::pair<Key, Gathering>> failed;
  const std::string name = agent_.info(peer).name;
  {
    const base::MutexLock lock(mutex_);
    for (auto entry = open_.begin(); entry != open_.end();) {
      if (entry->first.first.contains(name) && !entry->second.values.contains(name)) {
        failed.emplace_back(entry->first, std::move(entry->second));
        entry = open_.erase(entry);
      } else {
        ++entry;
      }
    }
  }
  for (auto& [key, gathering] : failed) {
    const CallFailure failure{.failure = {.kind = ErrorKind::kPeerLost,
                                          .message = base::cat("a gathering waits for ",
                                                               joined(missing(key.first, gathering.values)),
                                                               "; worker ", name, " is gone: ", cause),
                                          .peer = LostPeer{.rank = peer, .cause = cause}}};
    for (auto& waiting : gathering.requests) waiting.answer_failure(failure);
  }
}

// As ShutdownBarrier::on_close.
void Gatherings::on_close() {
  std::map<Key, Gathering> open;
  const base::MutexLock lock(mutex_);
  open.swap(open_);
}

}  // namespace internal

std::map<std::string, Object> all_gather(const Object& value, std::vector<std::string> names,
                                         CallOptions options) {
  const auto agent = current_agent("all_gather");
  return agent->service<internal::Gatherings>().gather(value, std::move(names),
                                                       agent->timeout_or_default(options.timeout));
}

void barrier(std::vector<std::string> names, CallOptions options) {
  const auto agent = current_agent("barrier");
  agent->service<internal::Gatherings>().gather(Object(true), std::move(names),
                                                agent->timeout_or_default(options.timeout));
}

}  // namespace lockstep::rpc
