// HMAC-SHA256, for the handshake and key derivation.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace lockstep::net::internal {

// Raises kInternal when the crypto library fails.
std::array<std::uint8_t, 32> hmac(std::span<const std::uint8_t> key, std::span<const std::uint8_t> text);

}  // namespace lockstep::net::internal
