// For variables whose empty value has a meaning: CUDA_VISIBLE_DEVICES="" hides every GPU. Thread safety: as
// environment.h.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include "lockstep/base/detail/environment.h"

namespace lockstep::base {

// The value verbatim, "" included; nothing when the variable is not set.
inline std::optional<std::string> environment_verbatim(EnvVar var) {
  const char* text = std::getenv(name_of(var));
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

}  // namespace lockstep::base
