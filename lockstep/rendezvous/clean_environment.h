// For tests: an environment that holds the given variables and, of all others lockstep knows, none; the
// previous values are restored at the end of the scope.
#pragma once

#include <cstdlib>
#include <map>
#include <string>

#include "lockstep/base/detail/environment.h"

namespace lockstep {

using Variables = std::map<std::string, std::string>;

class CleanEnvironment {
 public:
  explicit CleanEnvironment(const Variables& variables = {}) {
    for (const auto& info : base::environment_table()) {
      if (const char* text = std::getenv(info.name)) before_[info.name] = text;
      ::unsetenv(info.name);
    }
    for (const auto& [name, text] : variables) set(name, text);
  }
  ~CleanEnvironment() {
    for (const auto& info : base::environment_table()) ::unsetenv(info.name);
    for (const auto& [name, text] : before_) set(name, text);
  }
  CleanEnvironment(const CleanEnvironment&) = delete;
  CleanEnvironment& operator=(const CleanEnvironment&) = delete;

  static void set(const std::string& name, const std::string& text) {
    ::setenv(name.c_str(), text.c_str(), 1);
  }

 private:
  Variables before_;
};

}  // namespace lockstep
