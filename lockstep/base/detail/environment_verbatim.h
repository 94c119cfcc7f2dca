// For variables whose empty value is a statement of its own: CUDA_VISIBLE_DEVICES="" hides every GPU.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include "lockstep/base/detail/environment.h"

namespace lockstep::base {

// The value as it stands, "" included; nothing when the variable is not there.
inline std::optional<std::string> environment_verbatim(EnvVar var) {
  const char* text = std::getenv(name_of(var));
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

}  // namespace lockstep::base
