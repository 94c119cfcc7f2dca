#include "lockstep/rpc/function.h"

#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::rpc {
namespace {

struct Registry {
  base::Mutex mutex;
  // Entries stay where they are.
  std::unordered_map<std::string, FunctionEntry> by_name LOCKSTEP_GUARDED_BY(mutex);
  // By sources.
  std::unordered_map<std::string, std::unique_ptr<FunctionEntry>> found LOCKSTEP_GUARDED_BY(mutex);
  // (type, bytes of the pointer) -> name
  std::map<std::pair<std::string, std::string>, std::string> names LOCKSTEP_GUARDED_BY(mutex);
  std::vector<FunctionSource> sources LOCKSTEP_GUARDED_BY(mutex);
  std::string clash LOCKSTEP_GUARDED_BY(mutex);
};

// Filled by static initialisers of the program's files, in any order: hence a function-local static, and a
// clash that is kept for init_rpc to report instead of thrown before main.
Registry& registry() {
  static Registry functions;
  return functions;
}

std::pair<std::string, std::string> key_of(const void* key, std::size_t n_bytes, const std::type_info& type) {
  return {type.name(), std::string(static_cast<const char*>(key), n_bytes)};
}

}  // namespace

bool add_function(FunctionEntry entry, const void* key, std::size_t n_bytes, const std::type_info& type) {
  auto& functions = registry();
  const base::MutexLock lock(functions.mutex);
  const auto who = key_of(key, n_bytes, type);
  const std::string name = entry.name;
  const auto known = functions.names.find(who);
  if (!functions.by_name.try_emplace(name, std::move(entry)).second) {
    if (known != functions.names.end() && known->second == name) return true;
    if (functions.clash.empty())
      functions.clash = base::cat("two functions are registered for RPC as \"", name, "\"");
    return false;
  }
  functions.names.try_emplace(who, name);
  return true;
}

std::string registration_clash() {
  auto& functions = registry();
  const base::MutexLock lock(functions.mutex);
  return functions.clash;
}

bool register_function_source(FunctionSource source) {
  auto& functions = registry();
  const base::MutexLock lock(functions.mutex);
  functions.sources.push_back(source);
  return true;
}

namespace {

// Registered, or found before; null when neither.
const FunctionEntry* known_function(Registry& functions, const std::string& name)
    LOCKSTEP_REQUIRES(functions.mutex) {
  const auto entry = functions.by_name.find(name);
  if (entry != functions.by_name.end()) return &entry->second;
  const auto found = functions.found.find(name);
  return found == functions.found.end() ? nullptr : found->second.get();
}

[[noreturn]] void unknown_function(Registry& functions, const std::string& name)
    LOCKSTEP_REQUIRES(functions.mutex) {
  if (name.starts_with("new ")) {
    const std::string type = name.substr(4);
    base::raise(
        ErrorKind::kUsage,
        base::cat("objects of ", type, " cannot be made in this worker's program: write LOCKSTEP_RPC_CLASS(",
                  type, ", argument types of its constructor); in a source file that it contains"));
  }
  std::set<std::string> sorted;
  for (const auto& [other, unused] : functions.by_name) {
    if (!other.starts_with("lockstep.") && !other.starts_with("new ")) sorted.insert(other);
  }
  std::string names;
  for (const auto& other : sorted) {
    if (names.size() > 400) {
      names += ", ...";
      break;
    }
    names += (names.empty() ? "" : ", ") + other;
  }
  base::raise(ErrorKind::kUsage,
              base::cat("no function is registered for RPC as \"", name,
                        "\" in this worker's program; it has ", names.empty() ? "none" : names));
}

}  // namespace

// Sources are called without the lock, since they run code of other layers. Two threads may find the same
// name at once; the first entry stays, and its address is what both return.
const FunctionEntry& find_function(const std::string& name) {
  auto& functions = registry();
  base::MutexLock lock(functions.mutex);
  if (const auto* entry = known_function(functions, name)) return *entry;
  const auto sources = functions.sources;
  lock.unlock();
  for (const auto source : sources) {
    if (auto entry = source(name)) {
      lock.lock();
      return *functions.found.try_emplace(name, std::move(entry)).first->second;
    }
  }
  lock.lock();
  unknown_function(functions, name);
}

const FunctionEntry& find_function(const void* key, std::size_t n_bytes, const std::type_info& type) {
  auto& functions = registry();
  const base::MutexLock lock(functions.mutex);
  const auto name = functions.names.find(key_of(key, n_bytes, type));
  if (name == functions.names.end()) {
    const std::string what = base::demangle(type.name());
    const bool method = what.find("::*)") != std::string::npos;
    base::raise(ErrorKind::kUsage,
                base::cat("this ", method ? "method" : "function", ", a ", what,
                          ", is not registered for RPC: write ",
                          method ? "LOCKSTEP_RPC_METHOD(&Class::it)" : "LOCKSTEP_RPC_FUNCTION(it)",
                          "; once, in a source file that both workers' programs contain"));
  }
  return functions.by_name.find(name->second)->second;
}

}  // namespace lockstep::rpc
