// One world: the groups of a process, or of a rank thread, and what entering and leaving it needs. Private to group/.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/group/detail/rank_use.h"
#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/group/internal/joiner.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {

// How a group is to be made. Members are ranks of this world; this rank need not be one.
struct GroupPlan {
  const char* what;  // "new_group", for messages
  Members members;
  Milliseconds timeout;
  BackendParts parts{};  // empty: the default group's
  std::string desc{};
  std::string name{};          // "": numbered, or hashed
  bool hashed = false;         // only members call: not counted
  bool build_on_world = true;  // let engines build on the default group's communicator
};

// Thread safety: every method may be called from any thread; enter() refuses a second one at the same time.
class World {
 public:
  World() = default;
  // Leaves when the program forgot to. In a forked child the groups are the parent's and are left alone.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void enter(const InitOptions& options);
  // `group` null or the default group: all groups. An empty cause is an orderly leave.
  void leave(const Group& group, const std::string& cause);
  // Breaks first, then leaves.
  void abort(const Group& group, const std::string& reason);

  // Makes the next group, or only counts it for a non-member.
  Group make(const GroupPlan& plan);
  // The default group anew, without the excluded ranks; every other group ends.
  Group shrink(const std::vector<int>& excluded, bool abort_first, Milliseconds timeout);

  // The default group; null when there is none.
  Group group() const;
  // Null when there is none of that name.
  Group find(const std::string& name) const;
  // Raises kUsage when it is not one of this world's.
  void require(const Group& group, const char* what) const;
  // Of the rank thread whose world this is; null when it is the process's. Set before the world is used.
  std::shared_ptr<RankUse> rank_use{};
  // Every group's timeout becomes at least this.
  void raise_timeouts(Milliseconds timeout) const;
  // Groups counted so far, the default one included.
  int n_counted() const;

 private:
  // A world that was entered.
  struct Entered {
    Site site;
    std::string part;                     // of the store, where the site's keys are
    int n_shrinks = 0;                    // tried from here; only shrink() touches it
    Group group;                          // the default one
    std::map<std::string, Group> groups;  // by name, the default one included
    int n_counted = 1;
    std::map<std::string, int>
        n_made;  // groups made so far by "=name", and by ranks where only members count
  };
  struct Names {
    std::string name;
    std::string folder;  // of the group's keys: never used before
  };

  std::shared_ptr<Entered> join(const InitOptions& options);
  static std::string next_part(Store* store, int rank);
  std::shared_ptr<Entered> entered(const char* what) const;
  Names take_name(Entered& entered, const GroupPlan& plan);
  std::shared_ptr<Entered> take(const Group& group, const char* what, Group& one);
  static void close_all(const Entered& entered, const std::function<void(ProcessGroup&)>& close);

  mutable std::mutex mutex_;
  bool entering_ = false;             // guarded by mutex_
  std::shared_ptr<Entered> entered_;  // guarded by mutex_, and so is what it holds but for the site
  long owner_pid_ = -1;               // guarded by mutex_; who entered
};

World& process_world();
// This rank thread's world inside run_threads, else the process's.
World& current_world();

// What to say where the default group is needed and there is none; also when another copy of lockstep has one.
std::string not_initialised();

}  // namespace lockstep::internal
