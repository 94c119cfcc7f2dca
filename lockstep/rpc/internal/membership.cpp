#include "lockstep/rpc/internal/membership.h"

#include <chrono>
#include <set>
#include <thread>

#include "lockstep/base/log.h"
#include "lockstep/base/process.h"
#include "lockstep/base/text.h"
#include "lockstep/store/store_collectives.h"

namespace lockstep::rpc::internal {
namespace {

using namespace std::chrono_literals;

constexpr const char* kToken = "token";
constexpr const char* kMembers = "members";
// Whoever holds the token this long is taken to be gone.
constexpr auto kTokenLife = 15s;
constexpr Milliseconds kTell{5000};

enum class Change : std::uint8_t { kJoins, kLeaves };
struct MemberChange {
  Change change = Change::kJoins;
  MemberRecord who;
};
auto lockstep_fields(SelfOf<MemberChange> auto& self) {
  return fields({.name = "lockstep.rpc.MemberChange", .version = 1}, self.change, self.who);
}

MemberRecord record_of(Agent& agent) {
  return {.id = agent.self().id, .name = agent.self().name, .address = agent.address()};
}

std::string key_of(int rank) { return cat("worker/", rank); }

std::string missing(Store& store, int world_size) {
  std::string list;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = key_of(rank);
    if (!store.check({&key, 1})) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  }
  return list;
}

Milliseconds left(Deadline deadline) {
  if (deadline.is_never()) return Milliseconds::zero();
  return std::max(Milliseconds(1), std::chrono::duration_cast<Milliseconds>(deadline.remaining()));
}

// A lock in the store. Taken over from a holder that does not move: it is gone.
class Token {
 public:
  Token(Store& store, Deadline deadline) : store_(store), mine_(random_hex(16)) {
    Bytes seen;
    auto since = std::chrono::steady_clock::now();
    for (;;) {
      const auto now = std::chrono::steady_clock::now();
      const bool stale = !seen.empty() && now - since > kTokenLife;
      const Bytes holder = store_.compare_set(kToken, stale ? seen : to_bytes(""), to_bytes(mine_));
      if (as_text(holder) == mine_) return;
      if (holder != seen) seen = holder, since = now;
      // Given back: an empty text is not the absence that compare_set("") expects of a new key.
      if (holder.empty() || as_text(holder) == kFree) {
        if (as_text(store_.compare_set(kToken, holder, to_bytes(mine_))) == mine_) return;
      }
      if (deadline.expired()) {
        raise(ErrorKind::kTimeout, "another worker holds the group's token: it joins or leaves for too long");
      }
      std::this_thread::sleep_for(2ms);
    }
  }
  ~Token() {
    try {
      store_.compare_set(kToken, to_bytes(mine_), to_bytes(kFree));
    } catch (...) {
      log(LogLevel::kWarn, "the token of an RPC group could not be given back: " + current_failure().message);
    }
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

 private:
  static constexpr const char* kFree = "free";
  Store& store_;
  const std::string mine_;
};

std::vector<MemberRecord> read_members(Store& store) {
  const std::string key = kMembers;
  if (!store.check({&key, 1})) return {};
  return decode<std::vector<MemberRecord>>(store.get(key));
}

// Tells `who`; false when it is gone.
bool tell(Agent& agent, const MemberRecord& who, Change change) {
  try {
    agent
        .request(who.id, Kind::kMember, {.body = encode(MemberChange{.change = change, .who = record_of(agent)})},
                 kTell, cat("telling worker ", who.name, " of this one"))
        .wait();
    return true;
  } catch (const Error& error) {
    log(LogLevel::kWarn, cat("worker ", who.name, " does not answer and is taken off the list: ", error.what()));
    return false;
  }
}

}  // namespace

Members::Members(Agent& agent) : agent_(agent) {
  agent.handle(
      Kind::kMember, [this](Request request) { take(std::move(request)); }, Agent::Runs::kInThread);
}

void Members::take(Request request) {
  try {
    const auto change = decode<MemberChange>(request.body());
    const auto& who = change.who;
    if (change.change == Change::kJoins) {
      agent_.add_worker({.id = who.id, .name = who.name}, who.address);
      request.answer({});
    } else if (who.id == request.from()) {
      request.answer({});
      agent_.remove_worker(who.id);
    } else {
      raise(ErrorKind::kUsage, "a worker can only take itself off the list");
    }
  } catch (...) {
    request.answer_failure(current_call_failure());
  }
}

void join_static(Store& store, Agent& agent, int world_size, Deadline deadline) {
  store.set(key_of(agent.self().id), encode(record_of(agent)));
  std::map<std::string, int> names;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = key_of(rank);
    try {
      store.wait({&key, 1}, left(deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      raise(ErrorKind::kTimeout, cat("init_rpc of ", agent.self().name, ": of ", world_size, " workers these did not come: ",
                                     missing(store, world_size)));
    }
    const auto record = decode<MemberRecord>(store.get(key));
    if (record.id != rank) raise(ErrorKind::kUsage, cat("rank ", rank, " published itself as ", record.id));
    const auto [other, is_new] = names.try_emplace(record.name, rank);
    if (!is_new) {
      raise(ErrorKind::kUsage,
            cat("init_rpc: ranks ", other->second, " and ", rank, " are both named ", record.name));
    }
    agent.add_worker({.id = record.id, .name = record.name}, record.address);
  }
  store_barrier(store, agent.self().id, world_size, "ready", left(deadline));
}

WorkerId take_number(Store& store) {
  const auto number = store.add("next_number", 1) - 1;
  if (number > 0xFFFF) raise(ErrorKind::kResource, "all 65536 numbers of this RPC group have been used");
  return static_cast<WorkerId>(number);
}

void join_dynamic(Store& store, Agent& agent, Deadline deadline) {
  const Token token(store, deadline);
  const auto before = read_members(store);
  std::vector<MemberRecord> after;
  for (const auto& other : before) {
    const bool same_name = other.name == agent.self().name;
    if (!same_name && other.id != agent.self().id) {
      agent.add_worker({.id = other.id, .name = other.name}, other.address);
      if (tell(agent, other, Change::kJoins)) {
        after.push_back(other);
      } else {
        agent.remove_worker(other.id);
      }
      continue;
    }
    raise(ErrorKind::kUsage, cat("init_rpc: ", same_name ? "the name " + other.name : cat("number ", other.id),
                                 " is taken by worker ", other.name));
  }
  after.push_back(record_of(agent));
  store.set(kMembers, encode(after));
}

void leave_dynamic(Store& store, Agent& agent, Deadline deadline) {
  const Token token(store, deadline);
  auto members = read_members(store);
  std::erase_if(members, [&](const MemberRecord& record) { return record.id == agent.self().id; });
  store.set(kMembers, encode(members));
  for (const auto& other : members) tell(agent, other, Change::kLeaves);
}

}  // namespace lockstep::rpc::internal
