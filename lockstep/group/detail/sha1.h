// A digest for comparing long texts between ranks; not for anything that must resist an attacker.
// Thread safety: a pure function.
#pragma once

#include <string>

namespace lockstep::internal {

// Hexadecimal.
std::string sha1(const std::string& text);

}  // namespace lockstep::internal
