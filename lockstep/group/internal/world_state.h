// One world: a root group of ranks 0 to size - 1 that met over a store, and the groups made of its members.
// The default world's root is the default group, any other's was made by create_group. Private to group/.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/group/internal/backend_parts.h"
#include "lockstep/group/internal/group_builder.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

// The default world's name: its part of the store, and the default group's description.
inline constexpr const char* kDefaultWorld = "default_pg";

// How a world is to be entered.
struct WorldPlan {
  const char* what;              // "init_process_group", for messages
  std::string name;              // of the world: the part of the store that all its keys are in
  std::shared_ptr<Store> store;  // may be null for a world of one
  std::shared_ptr<Store>
      keep{};  // lives as long as the world: the store that `store` is a clone of, which may hold the server
  int rank = 0;
  int size = 1;
  bool launched = true;  // rank and size are those of the launcher, here; see is_launched in worlds.cpp
  Milliseconds timeout;
  Deadline deadline;             // of the joining
  BackendParts parts{};          // empty: chosen by the ranks' hosts
  std::string desc{};            // of the root group
  std::optional<int> device{};   // the GPU that this rank is bound to
  std::string engine_options{};  // for engines of device memory
};

// How a group is to be made. Members are ranks of this world; this rank need not be one.
struct GroupPlan {
  const char* what;  // "new_group", for messages
  Members members;
  Milliseconds timeout;
  BackendParts parts{};  // empty: the root group's
  std::string desc{};
  std::string name{};          // "": numbered, or hashed
  bool hashed = false;         // only members count it
  bool build_on_world = true;  // let engines build on the root group's communicator
};

// Thread safety: every method may be called from any thread.
class World {
 public:
  // Collective over all ranks: blocks until all have joined or the deadline passes, then raises.
  static std::shared_ptr<World> join(WorldPlan plan);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // The group of all ranks.
  const Group& root() const { return root_; }
  int rank() const { return site_.rank; }
  bool is_default() const { return name_ == kDefaultWorld; }

  // Makes the next group, or only counts it for a non-member.
  Group make(const GroupPlan& plan);
  // Collective over the survivors: a world of theirs, which numbers them from 0. This one stays until it is
  // left.
  std::shared_ptr<World> shrink(const std::vector<int>& excluded, Milliseconds timeout);
  // Takes one group out of the world, which no longer leaves it. False when it is none of this world's.
  bool remove(const Group& group);

  // Leaves every group, in descending order of names; make() raises from then on. An empty cause is an
  // orderly leave, unless the root group was broken by a loss, which is then the cause.
  void leave(const std::string& cause);
  // Breaks every group: all are broken before any is left, since leaving waits for what is still running.
  void abort(const std::string& reason) const;

  // Null when there is none of that name.
  Group find(const std::string& name) const;
  bool contains(const Group& group) const;
  // Every group's timeout becomes at least this.
  void raise_timeouts(Milliseconds timeout) const;
  // Groups counted so far, the root included.
  int n_counted() const;
  // True in the process that joined; a forked child holds a copy that is its parent's.
  bool is_of_this_process() const;

 private:
  struct Names {
    std::string key;
    std::string folder;  // of the group's keys: never used before
  };

  World(std::string name, std::string part);
  std::string full_name(const std::string& key) const;
  Names take_name(const GroupPlan& plan);
  void for_all(const std::function<void(ProcessGroup&)>& fn) const;

  // Constant once joined.
  const std::string name_;
  const std::string part_;  // of the store, where the site's keys are
  const long owner_pid_;
  std::shared_ptr<Store> keep_;
  WorldSite site_;
  Group root_;

  mutable std::mutex mutex_;
  bool left_ = false;                    // guarded by mutex_
  int n_shrinks_ = 0;                    // guarded by mutex_; tried from here
  std::map<std::string, Group> groups_;  // guarded by mutex_; by key, the root included
  int n_counted_ = 1;                    // guarded by mutex_
  std::map<std::string, int>
      n_made_;  // guarded by mutex_; so far by "=name", and by ranks where only members count
};

}  // namespace lockstep::internal
