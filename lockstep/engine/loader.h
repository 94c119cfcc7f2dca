// The registry of engines: built-in ones are added, plug-ins are loaded from a path. Each has a unique name.
// Thread safety: every method may be called from any thread. Engines are never removed and plug-ins never
// unloaded (their threads and static objects would outlive the code), so references stay valid as long as the
// registry.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/engine/engine.h"

namespace lockstep::comm {

// Loads a shared object (RTLD_NOW, RTLD_LOCAL) and checks its table. Raises kUnsupported saying what is wrong
// with it: not loadable, no lockstep_engine_v1, another ABI version, a table that is too short or lacks
// mandatory entries.
Engine load_engine(const std::string& path);

// Where a plug-in named after an engine is looked for, in this order: the folders of LOCKSTEP_ENGINE_PATH
// (separated by colons), lib/lockstep/engines beside the program's folder, that of the installed lockstep,
// that of its build tree.
std::vector<std::string> engine_folders();

class EngineRegistry {
 public:
  // Raises kUsage when an engine of that name is already registered.
  const Engine& add(Engine engine);
  // Null when there is none. Names are compared without regard to case.
  const Engine* find(const std::string& name) const;
  // As find; an engine that is not registered yet is loaded from lockstep_<name>.so in the first of
  // engine_folders() that has one, and added. Null when none has. Raises kUnsupported when there is one and
  // it cannot be used: as load_engine, or because the file is owned by neither this user nor root, or its
  // table gives another name.
  const Engine* find_or_load(const std::string& name);
  // In the order they were added.
  std::vector<std::string> names() const;

 private:
  const Engine* find_locked(const std::string& name) const LOCKSTEP_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::deque<Engine> engines_ LOCKSTEP_GUARDED_BY(mutex_);  // a deque: references stay valid
};

// Lower case, for names that users type.
std::string lower_case(std::string text);

}  // namespace lockstep::comm
