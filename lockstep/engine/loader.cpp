#include "lockstep/engine/loader.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <filesystem>
#include <sstream>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::comm {
namespace {

// The first file of that name; empty when there is none.
std::string find_plugin(const std::string& name) {
  const bool plain = std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  if (name.empty() || !plain) return "";
  for (const auto& folder : engine_folders()) {
    const auto path = std::filesystem::path(folder) / base::cat("lockstep_", name, ".so");
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path.string();
  }
  return "";
}

// Code is found by name, not by a path somebody chose: it must be ours to run.
void check_owner(const std::string& path) {
  struct stat file {};
  if (::stat(path.c_str(), &file) == 0 && (file.st_uid == 0 || file.st_uid == ::geteuid()) &&
      (file.st_mode & S_IWOTH) == 0) {
    return;
  }
  base::raise(
      ErrorKind::kUnsupported,
      base::cat("engine ", path,
                " is not loaded: it must belong to this user or to root, and not everybody may write it"),
      ErrorFamily::kBackend);
}

}  // namespace

std::vector<std::string> engine_folders() {
  std::vector<std::string> folders;
  std::istringstream given(base::environment(base::EnvVar::kLockstepEnginePath).value_or(""));
  for (std::string folder; std::getline(given, folder, ':');) {
    if (!folder.empty()) folders.push_back(folder);
  }
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (!ignored) folders.push_back(program.parent_path().parent_path() / "lib/lockstep/engines");
  folders.emplace_back(LOCKSTEP_INSTALLED_ENGINES);
  folders.emplace_back(LOCKSTEP_BUILT_ENGINES);
  return folders;
}

Engine load_engine(const std::string& path) {
  // dlerror is per thread in glibc. No dlclose on any path below: see the header.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    base::raise(ErrorKind::kUnsupported, base::cat("engine ", path, " cannot be loaded: ", ::dlerror()),
                ErrorFamily::kBackend);
  }
  void* symbol = ::dlsym(library, LOCKSTEP_ENGINE_SYMBOL);
  if (symbol == nullptr) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("engine ", path, " exports no ", LOCKSTEP_ENGINE_SYMBOL,
                          ": not an engine of lockstep, or one for another "
                          "version of the engine ABI"),
                ErrorFamily::kBackend);
  }
  return Engine(std::bit_cast<lockstep_engine_entry>(symbol)(), path);
}

const Engine& EngineRegistry::add(Engine engine) {
  const base::MutexLock lock(mutex_);
  if (const Engine* other = find_locked(engine.name())) {
    base::raise(ErrorKind::kUsage,
                base::cat("an engine named \"", engine.name(), "\" is loaded already (", other->origin(),
                          "); ", engine.origin(), " cannot be added beside it"));
  }
  return engines_.emplace_back(std::move(engine));
}

const Engine* EngineRegistry::find(const std::string& name) const {
  const base::MutexLock lock(mutex_);
  return find_locked(name);
}

// Loading runs the plug-in's static initialisers and takes long, so it happens without the lock. Two threads
// may load at once: dlopen returns the same library to both, and the first entry stays. engines_ is a deque,
// whose entries never move.
const Engine* EngineRegistry::find_or_load(const std::string& name) {
  if (const Engine* known = find(name)) return known;
  const std::string path = find_plugin(lower_case(name));
  if (path.empty()) return nullptr;
  check_owner(path);
  Engine engine = load_engine(path);
  if (lower_case(engine.name()) != lower_case(name)) {
    base::raise(ErrorKind::kUnsupported, base::cat("engine ", path, " calls itself \"", engine.name(), "\""),
                ErrorFamily::kBackend);
  }
  const base::MutexLock lock(mutex_);
  const Engine* other = find_locked(name);  // another thread was quicker
  return other != nullptr ? other : &engines_.emplace_back(std::move(engine));
}

const Engine* EngineRegistry::find_locked(const std::string& name) const {
  const auto wanted = lower_case(name);
  const auto found =
      std::ranges::find(engines_, wanted, [](const Engine& e) { return lower_case(e.name()); });
  return found == engines_.end() ? nullptr : &*found;
}

std::vector<std::string> EngineRegistry::names() const {
  const base::MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const Engine& engine : engines_) names.push_back(engine.name());
  return names;
}

std::string lower_case(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace lockstep::comm
