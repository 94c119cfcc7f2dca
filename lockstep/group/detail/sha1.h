// A digest for comparing long texts between ranks; nothing that must resist an attacker.
#pragma once

#include <string>

namespace lockstep::internal {

// Hexadecimal.
std::string sha1(const std::string& text);

}  // namespace lockstep::internal
