#include "lockstep/engine/loader.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cctype>

#include "lockstep/base/text.h"

namespace lockstep::comm {

Engine load_engine(const std::string& path) {
  // dlerror is per thread in glibc. No dlclose on any path below: see the header.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    raise(ErrorKind::kUnsupported, cat("engine ", path, " cannot be loaded: ", ::dlerror()),
          ErrorFamily::kBackend);
  }
  void* symbol = ::dlsym(library, LOCKSTEP_ENGINE_SYMBOL);
  if (symbol == nullptr) {
    raise(ErrorKind::kUnsupported,
          cat("engine ", path, " exports no ", LOCKSTEP_ENGINE_SYMBOL,
              ": not an engine of lockstep, or one for another "
              "version of the engine ABI"),
          ErrorFamily::kBackend);
  }
  return Engine(std::bit_cast<lockstep_engine_entry>(symbol)(), path);
}

const Engine& EngineRegistry::add(Engine engine) {
  const std::lock_guard lock(mutex_);
  if (const Engine* other = find_locked(engine.name())) {
    raise(ErrorKind::kUsage, cat("an engine named \"", engine.name(), "\" is there already (",
                                 other->origin(), "); ", engine.origin(), " cannot be added beside it"));
  }
  return engines_.emplace_back(std::move(engine));
}

const Engine* EngineRegistry::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return find_locked(name);
}

const Engine* EngineRegistry::find_locked(const std::string& name) const {
  const auto wanted = lower_case(name);
  const auto found =
      std::ranges::find(engines_, wanted, [](const Engine& e) { return lower_case(e.name()); });
  return found == engines_.end() ? nullptr : &*found;
}

std::vector<std::string> EngineRegistry::names() const {
  const std::lock_guard lock(mutex_);
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
