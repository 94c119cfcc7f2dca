// The worlds of a process, or of a rank thread: the default one and those that create_group made. Private to
// group/.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "lockstep/group/detail/rank_use.h"
#include "lockstep/group/internal/world_state.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {

// Thread safety: every method may be called from any thread; a name is entered by one thread at a time. No
// lock is held while ranks meet or leave. Lock order: this mutex, then a World's.
class Worlds {
 public:
  Worlds() = default;
  // Leaves what the program forgot to. In a forked child the groups are the parent's and are left alone.
  ~Worlds();
  Worlds(const Worlds&) = delete;
  Worlds& operator=(const Worlds&) = delete;

  // Enters the default world.
  void enter(const InitOptions& options);
  // Enters another one and returns its root group.
  Group create(const CreateGroupOptions& options);
  // One group; or, for a world's root (null: the default group), the whole world. An empty cause is an
  // orderly leave.
  void leave(const Group& group, const std::string& cause);
  void leave_all(const std::string& cause);
  // Breaks first, then leaves.
  void abort(const Group& group, const std::string& reason);
  // The world of the root group `old` anew, without the excluded ranks; every other group of it ends.
  Group shrink(const Group& old, const std::vector<int>& excluded, bool abort_first, Milliseconds timeout);

  // The default group; null when there is none.
  Group group() const;
  // By name, in all worlds: none, one, or one of each of two worlds.
  std::vector<Group> find(const std::string& name) const;
  // The world that a group (null: the default group) belongs to. Raises kUsage when it is in none of these,
  // saying whether it was destroyed.
  std::shared_ptr<World> of(const Group& group, const char* what) const;
  // Every group's timeout becomes at least this.
  void raise_timeouts(Milliseconds timeout) const;
  // Groups counted so far in the default world.
  int n_counted() const;
  // Of the rank thread whose worlds these are; null when they are the process's. Set before they are used.
  std::shared_ptr<RankUse> rank_use{};

 private:
  std::shared_ptr<World> join(const std::string& name, const std::function<WorldPlan()>& plan);
  std::shared_ptr<World> default_world() const;
  // Takes one group out of its world, or the whole world out of these. Both null for a non-member's handle.
  std::shared_ptr<World> take(const Group& group, const char* what, Group& one);
  void note_default(bool entered) const;

  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<World>> worlds_;  // guarded by mutex_; by name
  std::set<std::string> entering_;  // guarded by mutex_; names of worlds that are being joined
};

Worlds& process_worlds();
// This rank thread's worlds inside run_threads, else the process's.
Worlds& current_worlds();

// "" for a name that a group may have, else what is wrong with it.
std::string wrong_name(const std::string& name);

// What to say where the default group is needed and there is none; also when another copy of lockstep has
// one.
std::string not_initialised();

}  // namespace lockstep::internal
