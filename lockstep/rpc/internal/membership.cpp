#include "lockstep/rpc/internal/membership.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/internal/device_plan.h"
#include "lockstep/rpc/internal/shutdown_barrier.h"
#include "lockstep/store/store_collectives.h"

namespace lockstep::rpc::internal {
namespace {

using namespace std::chrono_literals;

constexpr const char* kLockKey = "token";
constexpr const char* kState = "state";
constexpr const char* kTakenOff = "it did not acknowledge changes of its group";
constexpr Milliseconds kLookAtStore{200};
// Of one that waits for notes: another's may say that this one will not come.
constexpr Milliseconds kLookForNotes{20};

enum class Change : std::uint8_t { kJoins, kLeaves, kIsTakenOff, kIsAskedFor };
struct MemberChange {
  Change change = Change::kJoins;
  MemberRecord who;
};
auto lockstep_fields(SelfOf<MemberChange> auto& self) {
  return fields({.name = "lockstep.rpc.MemberChange", .version = 1}, self.change, self.who);
}

MemberRecord record_of(Agent& agent) {
  return {.id = agent.self().id,
          .name = agent.self().name,
          .address = agent.address(),
          .device_maps = agent.options().device_maps,
          .devices = agent.options().devices};
}

void add_member(Agent& agent, const MemberRecord& record) {
  const auto map = record.device_maps.find(agent.self().name);
  agent.add_worker({.id = record.id, .name = record.name}, record.address,
                   map == record.device_maps.end() ? DeviceMap{} : map->second);
}

DevicePlan plan_of(const MemberRecord& record) {
  return {.worker = record.name, .maps = record.device_maps, .devices = record.devices};
}

std::string key_of(int rank) {
  return base::cat("worker/", rank);
}

// One request per rank: only for messages.
std::string missing(Store& store, int world_size) {
  std::string list;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = key_of(rank);
    if (!store.check({&key, 1})) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  }
  return list;
}

// A lock in the store. Taken over from a holder that does not move: it is gone.
class MembershipLock {
 public:
  MembershipLock(Store& store, Deadline deadline, Milliseconds life)
      : store_(store), mine_(base::random_hex(16)) {
    // `seen` and `since`: a holder counts as gone when the value, which is random per holder, has not changed
    // for `life`. Clocks of different hosts are not compared.
    Bytes seen;
    base::SlowWait slow(deadline);
    auto since = std::chrono::steady_clock::now();
    for (;;) {
      const auto now = std::chrono::steady_clock::now();
      const bool stale = !seen.empty() && now - since > life;
      const Bytes holder = store_.compare_set(kLockKey, stale ? seen : to_bytes(""), to_bytes(mine_));
      if (as_text(holder) == mine_) return;
      if (holder != seen) seen = holder, since = now;
      // Given back: an empty text is not the absence that compare_set("") expects of a new key.
      if (holder.empty() || as_text(holder) == kFree) {
        if (as_text(store_.compare_set(kLockKey, holder, to_bytes(mine_))) == mine_) return;
      }
      if (deadline.expired()) {
        base::raise(ErrorKind::kTimeout,
                    "another worker has held the group's membership lock for too long, to join or to leave");
      }
      slow.say_if_due([] {
        return "this worker waits to join or leave its RPC group: another one does, and is not done";
      });
      std::this_thread::sleep_for(2ms);
    }
  }
  ~MembershipLock() {
    try {
      store_.compare_set(kLockKey, to_bytes(mine_), to_bytes(kFree));
    } catch (...) {
      base::log(LogLevel::kWarn, "the membership lock of an RPC group could not be released: " +
                                     base::current_failure().message);
    }
  }
  MembershipLock(const MembershipLock&) = delete;
  MembershipLock& operator=(const MembershipLock&) = delete;

 private:
  static constexpr const char* kFree = "free";
  Store& store_;
  const std::string mine_;
};

// Who is there, after how many changes.
struct MembershipState {
  std::uint64_t epoch = 0;
  std::vector<MemberRecord> members;
};
auto lockstep_fields(SelfOf<MembershipState> auto& self) {
  return fields({.name = "lockstep.rpc.Group", .version = 1}, self.epoch, self.members);
}

std::string change_key(std::uint64_t epoch) {
  return base::cat("change/", epoch);
}
// Its value: numbers of workers that this one knows to be gone.
std::string noted_key(std::uint64_t epoch, int id) {
  return base::cat("noted/", epoch, "/", id);
}

void apply(MembershipState& state, const MemberChange& what) {
  if (what.change == Change::kIsAskedFor) return;
  std::erase_if(state.members, [&](const MemberRecord& record) { return record.id == what.who.id; });
  if (what.change == Change::kJoins) state.members.push_back(what.who);
}

// The state in the store, with the changes whose writer died before it added them to the state. Pre: the
// membership lock is held.
MembershipState read_state(Store& store) {
  MembershipState state;
  const std::string key = kState;
  if (store.check({&key, 1})) state = decode<MembershipState>(store.get(key));
  for (;;) {
    const std::string next = change_key(state.epoch + 1);
    if (!store.check({&next, 1})) return state;
    apply(state, decode<MemberChange>(store.get(next)));
    ++state.epoch;
  }
}

// Waits until each of `others` has acknowledged the change, or is reported lost by one that has; returns
// those that have not.
std::vector<MemberRecord> await_notes(Store& store, std::uint64_t epoch, std::vector<MemberRecord> others,
                                      std::set<WorkerId> lost, Deadline deadline) {
  for (;;) {
    std::erase_if(others, [&](const MemberRecord& other) {
      const std::string key = noted_key(epoch, other.id);
      if (!store.check({&key, 1})) return false;
      for (const WorkerId id : decode<std::vector<WorkerId>>(store.get(key))) lost.insert(id);
      store.delete_key(key);
      return true;
    });
    const auto next =
        std::ranges::find_if(others, [&](const MemberRecord& other) { return !lost.contains(other.id); });
    if (next == others.end() || deadline.expired()) return others;
    const std::string key = noted_key(epoch, next->id);
    try {
      store.wait({&key, 1}, std::min(kLookForNotes, base::time_left(deadline)));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
  }
}

// Writes a change and waits until everyone else has acknowledged it; those that do not are removed, each by a
// change of its own that follows. The change is in the store before anyone is waited for, and the state is
// written after: a worker that takes over the lock of one that died in between replays the changes that the
// state does not have (read_state). Pre: the membership lock is held.
void change(Store& store, Agent& agent, MembershipState& state, const MemberChange& first,
            Milliseconds tell) {
  std::vector<MemberChange> changes{first};
  // `changes` grows while it is worked off: each member that stays silent adds its own removal, which the
  // others acknowledge in turn.
  std::set<WorkerId> silent;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const MemberChange what = changes[i];
    const std::uint64_t epoch = ++state.epoch;
    store.set(change_key(epoch), encode(what));
    std::vector<MemberRecord> others;
    for (const auto& member : state.members) {
      const bool knows =
          what.change != Change::kIsAskedFor && (member.id == agent.self().id || member.id == what.who.id);
      if (!knows && !silent.contains(member.id)) others.push_back(member);
    }
    const auto known = agent.gone();
    for (const auto& gone :
         await_notes(store, epoch, others, {known.begin(), known.end()}, Deadline::after(tell))) {
      const bool dead = std::ranges::find(known, gone.id) != known.end();
      base::log(dead ? LogLevel::kInfo : LogLevel::kWarn,
                base::cat("worker ", gone.name, dead ? " is gone" : " does not acknowledge changes",
                          " and is removed from the group"));
      silent.insert(gone.id);
      changes.push_back({.change = Change::kIsTakenOff, .who = gone});
    }
    apply(state, what);
    // Before the change that it follows from is forgotten: this worker may die between any two lines.
    store.set(kState, encode(state));
    if (epoch > 1) store.delete_key(change_key(epoch - 1));
    if (what.change == Change::kIsTakenOff && what.who.id != agent.self().id)
      agent.remove_worker(what.who.id, kTakenOff);
  }
}

const MemberRecord* who_is_in_the_way(const MembershipState& state, const WorkerInfo& self) {
  const auto found = std::ranges::find_if(state.members, [&](const MemberRecord& other) {
    return other.name == self.name || other.id == self.id;
  });
  return found == state.members.end() ? nullptr : &*found;
}

// The worker that has this one's name or number is asked whether it is still alive. Pre: the membership lock
// is held. The question is a change like any other, so all members take part in finding out: a killed worker
// cannot acknowledge, and a member that had a connection to it knows of its end. Asked again when another
// worker took the name meanwhile (`address` differs).
void make_room(Store& store, Agent& agent, MembershipState& state, Milliseconds tell) {
  const WorkerInfo& self = agent.self();
  while (const auto* found = who_is_in_the_way(state, self)) {
    const MemberRecord other = *found;
    change(store, agent, state, {.change = Change::kIsAskedFor, .who = other}, tell);
    const auto* still = who_is_in_the_way(state, self);
    if (still == nullptr || still->address != other.address) continue;
    base::raise(ErrorKind::kUsage,
                base::cat("init_rpc: ",
                          other.name == self.name ? "the name " + other.name : base::cat("number ", other.id),
                          " is taken by worker ", other.name));
  }
}

}  // namespace

namespace {

// False at the deadline.
bool wait_for_record(Store& store, const std::string& key, Deadline deadline, base::SlowWait& slow,
                     const std::function<std::string()>& waiting) {
  for (;;) {
    try {
      store.wait({&key, 1}, slow.quiet_slice());
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    if (deadline.expired()) return false;
    slow.say_if_due(waiting);
  }
}

}  // namespace

void join_static(Store& store, Agent& agent, int world_size, Deadline deadline) {
  store.set(key_of(agent.self().id), encode(record_of(agent)));
  std::map<std::string, int> names;
  std::vector<MemberRecord> records;
  base::SlowWait slow(deadline);
  const auto waiting = [&] {
    return base::cat("init_rpc of ", agent.self().name,
                     " waits for workers that have not arrived yet: ranks ", missing(store, world_size));
  };
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = key_of(rank);
    if (!wait_for_record(store, key, deadline, slow, waiting)) {
      base::raise(ErrorKind::kTimeout,
                  base::cat("init_rpc of ", agent.self().name, ": of ", world_size,
                            " workers these did not arrive: ", missing(store, world_size)));
    }
    const auto& record = records.emplace_back(decode<MemberRecord>(store.get(key)));
    if (record.id != rank)
      base::raise(ErrorKind::kUsage, base::cat("rank ", rank, " published itself as ", record.id));
    const auto [other, is_new] = names.try_emplace(record.name, rank);
    if (!is_new) {
      base::raise(ErrorKind::kUsage, base::cat("init_rpc: ranks ", other->second, " and ", rank,
                                               " are both named ", record.name));
    }
  }
  // By every worker on the records of all: what is wrong with one is raised by all, and nobody waits below.
  std::vector<DevicePlan> plans;
  for (const auto& record : records) plans.push_back(plan_of(record));
  check_device_plans(plans);
  for (const auto& record : records) add_member(agent, record);
  // No worker may call another before that one knows all of its peers: transports reject unknown workers.
  store_barrier(store, agent.self().id, world_size, "ready", base::time_left(deadline));
}

namespace {

constexpr const char* kGiven = "given";
constexpr const char* kAskedFor = "asked for";

// Marks a number for ever; returns what it is marked as.
std::string mark_number(Store& store, std::int64_t number, const char* as) {
  return std::string(as_text(store.compare_set(base::cat("number/", number), to_bytes(""), to_bytes(as))));
}

}  // namespace

void keep_number(Store& store, WorkerId number) {
  mark_number(store, number, kAskedFor);
}

WorkerId take_number(Store& store) {
  for (;;) {
    const auto number = store.add("next_number", 1) - 1;
    if (number > 0xFFFF)
      base::raise(ErrorKind::kResource, "all 65536 numbers of this RPC group have been used");
    // Only one worker is given a number: if it is marked as given, it was now.
    if (mark_number(store, number, kGiven) == kGiven) return static_cast<WorkerId>(number);
  }
}

void claim_number(Store& store, WorkerId number) {
  if (mark_number(store, number, kAskedFor) == kAskedFor) return;
  base::raise(ErrorKind::kUsage,
              base::cat("init_rpc: number ", number,
                        " was given to a worker that asked for none; ask for a larger one, or let all "
                        "workers ask for theirs"));
}

std::unique_ptr<DynamicGroup> DynamicGroup::join(const std::shared_ptr<Store>& store,
                                                 std::shared_ptr<Agent> agent, Deadline deadline,
                                                 Patience patience) {
  // Under the lock from reading the state to the last acknowledgement: members see changes one at a time and
  // in the same order.
  const MembershipLock lock(*store, deadline, patience.lock);
  auto state = read_state(*store);
  make_room(*store, *agent, state, patience.tell);
  for (const auto& other : state.members) add_member(*agent, other);
  change(*store, *agent, state, {.change = Change::kJoins, .who = record_of(*agent)}, patience.tell);
  return std::unique_ptr<DynamicGroup>(new DynamicGroup(store, std::move(agent), state.epoch, patience));
}

DynamicGroup::DynamicGroup(const std::shared_ptr<Store>& store, std::shared_ptr<Agent> agent,
                           std::uint64_t epoch, Patience patience)
    : store_(store),
      watch_store_(store->clone()),
      agent_(std::move(agent)),
      patience_(patience),
      thread_("ls-rpc-members", [this, epoch] { watch(epoch + 1); }) {}

DynamicGroup::~DynamicGroup() {
  stop();
}

void DynamicGroup::stop() {
  stopping_ = true;
  thread_.join();
}

// Own store handle (watch_store_): it blocks in the store while another thread leaves through store_.
void DynamicGroup::watch(std::uint64_t epoch) {
  while (!stopping_) {
    try {
      const std::string key = change_key(epoch);
      try {
        watch_store_->wait({&key, 1}, kLookAtStore);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kTimeout) continue;
        throw;
      }
      if (!note(epoch)) return;
      ++epoch;
    } catch (...) {
      if (stopping_) return;
      base::log(LogLevel::kError,
                "this worker no longer follows changes of its RPC group: " + base::current_failure().message);
      return;
    }
  }
}

// The acknowledgement is written after the change was applied: whoever waits for it may rely on that.
bool DynamicGroup::note(std::uint64_t epoch) {
  const auto what = decode<MemberChange>(watch_store_->get(change_key(epoch)));
  const bool about_me = what.who.id == agent_->self().id;
  std::optional<WorkerId> lost;
  switch (what.change) {
    case Change::kJoins:
      add_member(*agent_, what.who);
      break;
    case Change::kLeaves:
    case Change::kIsTakenOff:
      if (about_me) {
        base::log(LogLevel::kError,
                  base::cat("worker ", agent_->self().name,
                            " was removed from its group: it did not acknowledge a change"));
        return false;
      }
      agent_->remove_worker(what.who.id, what.change == Change::kLeaves ? "it left" : kTakenOff);
      break;
    case Change::kIsAskedFor:
      if (about_me) break;
      try {
        ping(*agent_, what.who.id, patience_.tell / 4).wait();
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kPeerLost) lost = what.who.id;
      }
  }
  auto gone = agent_->gone();
  if (lost) gone.push_back(*lost);
  watch_store_->set(noted_key(epoch, agent_->self().id), encode(gone));
  return true;
}

void DynamicGroup::leave(Deadline deadline) {
  const MembershipLock lock(*store_, deadline, patience_.lock);
  // Only now: while another holds the lock it waits for this worker to acknowledge its change.
  stop();
  auto state = read_state(*store_);
  const auto self = record_of(*agent_);
  const bool listed = std::ranges::any_of(state.members, [&](const MemberRecord& member) {
    return member.id == self.id && member.address == self.address;
  });
  if (!listed) return;  // removed; its number may be another's now
  change(*store_, *agent_, state, {.change = Change::kLeaves, .who = self}, patience_.tell);
}

}  // namespace lockstep::rpc::internal
