#include "lockstep/rpc/internal/membership.h"

#include <algorithm>
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
constexpr const char* kState = "state";
// Whoever holds the token this long is taken to be gone.
constexpr auto kTokenLife = 15s;
constexpr Milliseconds kTell{5000};
constexpr Milliseconds kLook{200};

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

std::string key_of(int rank) {
  return cat("worker/", rank);
}

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

// Who is there, after how many changes.
struct GroupState {
  std::uint64_t epoch = 0;
  std::vector<MemberRecord> members;
};
auto lockstep_fields(SelfOf<GroupState> auto& self) {
  return fields({.name = "lockstep.rpc.Group", .version = 1}, self.epoch, self.members);
}

std::string change_key(std::uint64_t epoch);
void apply(GroupState& state, const MemberChange& what) {
  std::erase_if(state.members, [&](const MemberRecord& record) { return record.id == what.who.id; });
  if (what.change == Change::kJoins) state.members.push_back(what.who);
}

// As the store says, with changes whose writer died before it wrote them down there. Pre: the token is held.
GroupState read_state(Store& store) {
  GroupState state;
  const std::string key = kState;
  if (store.check({&key, 1})) state = decode<GroupState>(store.get(key));
  for (;;) {
    const std::string next = change_key(state.epoch + 1);
    if (!store.check({&next, 1})) return state;
    apply(state, decode<MemberChange>(store.get(next)));
    ++state.epoch;
  }
}

std::string change_key(std::uint64_t epoch) {
  return cat("change/", epoch);
}
std::string noted_key(std::uint64_t epoch, int id) {
  return cat("noted/", epoch, "/", id);
}

// Writes the next change and waits for everyone else; those that take no note are taken off. Pre: the token is held.
void change(Store& store, Agent& agent, GroupState& state, Change what, const MemberRecord& who) {
  const std::uint64_t epoch = ++state.epoch;
  store.set(change_key(epoch), encode(MemberChange{.change = what, .who = who}));
  std::vector<MemberRecord> silent;
  const Deadline deadline = Deadline::after(kTell);
  for (const auto& other : state.members) {
    if (other.id == agent.self().id || other.id == who.id) continue;
    const std::string key = noted_key(epoch, other.id);
    try {
      store.wait({&key, 1}, left(deadline));
      store.delete_key(key);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      silent.push_back(other);
    }
  }
  apply(state, {.change = what, .who = who});
  if (epoch > 1) store.delete_key(change_key(epoch - 1));
  std::erase_if(state.members, [&](const MemberRecord& record) {
    return std::ranges::any_of(silent, [&](const MemberRecord& gone) { return gone.id == record.id; });
  });
  for (const auto& gone : silent) {
    log(LogLevel::kWarn, cat("worker ", gone.name, " takes no note of changes and is taken off the list"));
    change(store, agent, state, Change::kLeaves, gone);
    if (gone.id != agent.self().id) agent.remove_worker(gone.id);
  }
}

}  // namespace

void join_static(Store& store, Agent& agent, int world_size, Deadline deadline) {
  store.set(key_of(agent.self().id), encode(record_of(agent)));
  std::map<std::string, int> names;
  std::vector<MemberRecord> records;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = key_of(rank);
    try {
      store.wait({&key, 1}, left(deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      raise(ErrorKind::kTimeout, cat("init_rpc of ", agent.self().name, ": of ", world_size,
                                     " workers these did not come: ", missing(store, world_size)));
    }
    const auto& record = records.emplace_back(decode<MemberRecord>(store.get(key)));
    if (record.id != rank) raise(ErrorKind::kUsage, cat("rank ", rank, " published itself as ", record.id));
    const auto [other, is_new] = names.try_emplace(record.name, rank);
    if (!is_new) {
      raise(ErrorKind::kUsage,
            cat("init_rpc: ranks ", other->second, " and ", rank, " are both named ", record.name));
    }
  }
  for (const auto& record : records) agent.add_worker({.id = record.id, .name = record.name}, record.address);
  store_barrier(store, agent.self().id, world_size, "ready", left(deadline));
}

WorkerId take_number(Store& store) {
  const auto number = store.add("next_number", 1) - 1;
  if (number > 0xFFFF) raise(ErrorKind::kResource, "all 65536 numbers of this RPC group have been used");
  return static_cast<WorkerId>(number);
}

std::unique_ptr<DynamicGroup> DynamicGroup::join(const std::shared_ptr<Store>& store,
                                                 std::shared_ptr<Agent> agent, Deadline deadline) {
  const Token token(*store, deadline);
  auto state = read_state(*store);
  for (const auto& other : state.members) {
    const bool same_name = other.name == agent->self().name;
    if (!same_name && other.id != agent->self().id) continue;
    raise(ErrorKind::kUsage,
          cat("init_rpc: ", same_name ? "the name " + other.name : cat("number ", other.id),
              " is taken by worker ", other.name));
  }
  for (const auto& other : state.members)
    agent->add_worker({.id = other.id, .name = other.name}, other.address);
  change(*store, *agent, state, Change::kJoins, record_of(*agent));
  store->set(kState, encode(state));
  return std::unique_ptr<DynamicGroup>(new DynamicGroup(store, std::move(agent), state.epoch));
}

DynamicGroup::DynamicGroup(const std::shared_ptr<Store>& store, std::shared_ptr<Agent> agent,
                           std::uint64_t epoch)
    : store_(store),
      watch_store_(store->clone()),
      agent_(std::move(agent)),
      thread_("ls-rpc-members", [this, epoch] { watch(epoch + 1); }) {}

DynamicGroup::~DynamicGroup() {
  stop();
}

void DynamicGroup::stop() {
  stopping_ = true;
  thread_.join();
}

void DynamicGroup::watch(std::uint64_t epoch) {
  while (!stopping_) {
    try {
      const std::string key = change_key(epoch);
      try {
        watch_store_->wait({&key, 1}, kLook);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kTimeout) continue;
        throw;
      }
      const auto what = decode<MemberChange>(watch_store_->get(key));
      if (what.who.id == agent_->self().id) {
        log(LogLevel::kError, cat("worker ", agent_->self().name,
                                  " was taken off its group's list: it took no note of a change"));
        return;
      }
      if (what.change == Change::kJoins) {
        agent_->add_worker({.id = what.who.id, .name = what.who.name}, what.who.address);
      }
      watch_store_->set(noted_key(epoch, agent_->self().id), to_bytes("yes"));
      if (what.change == Change::kLeaves) agent_->remove_worker(what.who.id);
      ++epoch;
    } catch (...) {
      if (stopping_) return;
      log(LogLevel::kError,
          "changes of the RPC group are not heard of any more: " + current_failure().message);
      return;
    }
  }
}

void DynamicGroup::leave(Deadline deadline) {
  const Token token(*store_, deadline);
  // Only now: while another holds the token it waits for this worker to take note.
  stop();
  auto state = read_state(*store_);
  change(*store_, *agent_, state, Change::kLeaves, record_of(*agent_));
  store_->set(kState, encode(state));
}

}  // namespace lockstep::rpc::internal
