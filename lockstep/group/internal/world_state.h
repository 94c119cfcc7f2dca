// One world: the default group of a process, or of a rank thread, and what entering it needs. Private to group/.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "lockstep/engine/loader.h"
#include "lockstep/group/internal/join.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {

// Thread safety: every method may be called from any thread; enter() refuses a second one at the same time.
class World {
 public:
  World() = default;
  // Leaves when the program forgot to. In a forked child the group is the parent's and is left alone.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void enter(const InitOptions& options);
  // `group` null or the default group; an empty cause is an orderly leave.
  void leave(const Group& group, const std::string& cause);
  // Null when there is none.
  Group group() const;

 private:
  Group join(const InitOptions& options);

  mutable std::mutex mutex_;
  bool entering_ = false;  // guarded by mutex_
  Group group_;            // guarded by mutex_
  long owner_pid_ = -1;    // guarded by mutex_; who entered
  int generation_ = 0;     // how often this world was entered; only enter() touches it
};

// This rank thread's world inside run_threads, else the process's.
World& current_world();
// Null outside run_threads.
World*& thread_world();

// Engines by name, the built-in one included.
comm::EngineRegistry& engines();
// "", "host", "cpu:host" in any case become an engine; raises kUsage for a malformed text, kUnsupported naming what
// exists for an unknown name or another device.
const comm::Engine& choose_engine(const std::string& backend);

}  // namespace lockstep::internal
