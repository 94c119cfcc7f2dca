// The reference bookkeeping of RRefs on one worker. A state machine without threads, clocks or messages:
// events go in, what is to be sent and dropped comes out.
//
// Terms: a value is stored at its owner. Every other worker that refers to it holds a fork, a number that its
// creator chose; the owner keeps the list of a value's forks and releases the value when none is left. A
// worker that passes its fork on makes a child fork.
//
// The protocol (docs/rpc-protocol.md has the argument why it is safe in any order of messages):
//   owner passes on     the child is registered when it is sent, and confirmed when it arrives
//   user passes on      the child asks the owner (kFork); when that is answered it notifies its parent
//                       (kAccept), which holds its own fork until then
//   user to the owner   the owner notifies the parent immediately (kAccept)
//   a handle is gone    kDelete goes to the owner, once the fork is confirmed and no child waits for it
// kFork, kAccept and kDelete may be repeated and overtake each other and everything else. What they name is
// never named again, and the last hundred thousand that ended are remembered, so a repetition changes
// nothing.
//
// Entries for one worker are batched while a message to it is in flight: at most one message of a kind is.
// Thread safety: none; RRefManager locks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/rpc/detail/recent_ids.h"
#include "lockstep/rpc/detail/rref_on_wire.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc {
struct OwnedValue;
}

namespace lockstep::rpc::internal {

struct ForkEntry {
  std::uint64_t rref = 0;
  std::uint64_t fork = 0;
  friend auto operator<=>(const ForkEntry&, const ForkEntry&) = default;
};

enum class Control : std::uint8_t { kFork, kAccept, kDelete };

struct RRefSend {
  WorkerId to = 0;
  Control control = Control::kFork;
  std::vector<ForkEntry> entries{};
};

// What to do next, without the lock.
struct RRefActions {
  std::vector<RRefSend> sends{};
  std::vector<std::shared_ptr<OwnedValue>> dropped{};   // to be destroyed
  std::vector<std::shared_ptr<OwnedValue>> orphaned{};  // whose creator is gone: they will never be made
};

class RRefTable {
 public:
  using Value = std::shared_ptr<OwnedValue>;
  using Actions = RRefActions;
  struct Options {
    WorkerId self = 0;
    std::function<std::uint64_t()> new_id;
    std::function<Value()> new_value;  // one that waits for its creation
  };
  explicit RRefTable(Options options) : options_(std::move(options)) {}

  // As owner.
  // remote() from `holder` has come, and its function will run. A placeholder already exists if the value was
  // asked for before. Null when it must not run: the RRef was created before (its value has a type that
  // others rely on), or its number is not the holder's.
  Value create_here(const RRefOnWire& ref, WorkerId holder);
  // The value is asked for. Null: it was deleted, or will never be created.
  Value find(std::uint64_t rref);
  // A child for `to`, registered.
  RRefOnWire share_owned(std::uint64_t rref, const Value& value, WorkerId to);

  // As user.
  // remote() is about to be sent to the owner.
  void create_there(const RRefOnWire& ref);
  // It was answered, or has failed: the owner knows the fork, or will never be notified of it, or may be
  // later.
  void creation_over(std::uint64_t fork, Actions& out);
  // A child for `to`; false when `fork` is none of this worker's, or has been given up.
  bool share_used(std::uint64_t fork, WorkerId to, RRefOnWire& child);
  // The last handle is gone.
  void drop(std::uint64_t fork, Actions& out);
  // As if every handle of this worker were gone.
  void drop_all(Actions& out);

  // As both.
  // What share_* made was not sent.
  void unshare(const RRefOnWire& child, Actions& out);
  // It came from `from`, whose child it is. Returns the value when it is owned here; null when it is a fork
  // of this worker now. False in `fits` for what no correct worker sends.
  Value receive(const RRefOnWire& ref, WorkerId from, bool& fits, Actions& out);

  // Control messages. Returns the forks that the owner refuses: their value is gone.
  std::vector<std::uint64_t> take(WorkerId from, Control control, std::span<const ForkEntry> entries,
                                  Actions& out);
  // The message of that kind to `to` was answered.
  void answered(WorkerId to, Control control, std::span<const std::uint64_t> refused, Actions& out);
  // It will never be answered.
  void unanswered(WorkerId to, Control control, Actions& out);
  void lost(WorkerId worker, Actions& out);
  // The number is in use again, by another worker.
  void joined(WorkerId worker) { lost_.erase(worker); }

  // Everything this worker owns for others, when it ends.
  std::vector<Value> take_values();
  std::vector<Value> values() const;

  // Observers.
  // Workers that are gone, and have not come back under their number.
  const std::set<WorkerId>& lost_workers() const { return lost_; }
  bool confirmed(std::uint64_t fork) const;
  // Nothing is in flight and nothing waits for an answer.
  bool idle() const;
  std::size_t n_owned() const { return owned_.size(); }
  std::size_t n_forks() const;
  std::size_t n_users() const { return users_.size(); }
  std::size_t n_pending_users() const;
  std::size_t n_on_the_way() const;
  // Calls visit(rref, value, forks) for every value that others refer to.
  template <class Visit>
  void for_each_forked(Visit&& visit) const {
    for (const auto& [rref, owned] : owned_) {
      if (!owned.forks.empty()) visit(rref, owned.value, owned.forks);
    }
  }

 private:
  enum class Phase : std::uint8_t {
    kCreating,
    kAsking,
    kConfirmed,
    kCut
  };  // kCut: the owner is not notified of its end
  struct User {
    std::uint64_t rref = 0;
    WorkerId owner = 0;
    WorkerId parent = 0;
    Phase phase = Phase::kConfirmed;
    bool dropped = false;
    std::size_t n_children = 0;
  };
  struct Child {
    std::uint64_t parent = 0;  // the fork it holds
    WorkerId to = 0;
  };
  struct Owned {
    Value value{};
    bool called = false;                                  // its creation has come
    std::unordered_map<std::uint64_t, WorkerId> forks{};  // fork -> who holds it
  };
  struct Box {
    std::vector<ForkEntry> waiting{};
    std::vector<ForkEntry> flying{};
  };
  using Owneds = std::unordered_map<std::uint64_t, Owned>;

  // Null: it has been released, or its creator is gone.
  Owned* find_or_wait(std::uint64_t rref);
  void add_fork(Owned& owned, std::uint64_t fork, WorkerId holder);
  void remove_fork(const ForkEntry& entry, Actions& out);
  Owneds::iterator release_if_unused(Owneds::iterator owned, Actions& out);
  void release_if_over(std::uint64_t fork, Actions& out);
  void release_child(std::uint64_t child, Actions& out);
  bool ask(const ForkEntry& entry, WorkerId from);
  void confirm(const ForkEntry& entry, bool refused, Actions& out);
  void post(WorkerId to, Control control, ForkEntry entry, Actions& out);
  void lose_as_owner(WorkerId worker, Actions& out);
  void lose_as_user(WorkerId worker, Actions& out);

  const Options options_;
  std::unordered_map<std::uint64_t, User> users_;      // by fork
  std::unordered_map<std::uint64_t, Child> children_;  // by fork, until they are accepted
  Owneds owned_;                                       // by RRef: those with forks, or waited for
  std::map<std::pair<WorkerId, Control>, Box> boxes_;
  std::set<WorkerId> lost_;
  RecentIds ended_{100'000};  // RRefs and forks
};

// The worker that generated the id of an RRef or a fork.
inline WorkerId maker_of(std::uint64_t id) {
  return static_cast<WorkerId>(id >> 48);
}

}  // namespace lockstep::rpc::internal
