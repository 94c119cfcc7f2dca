#include "lockstep/net/internal/hmac.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::net::internal {

std::array<std::uint8_t, 32> hmac(std::span<const std::uint8_t> key, std::span<const std::uint8_t> text) {
  std::array<std::uint8_t, 32> result;
  unsigned length = 0;
  if (::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), text.data(), text.size(), result.data(),
             &length) == nullptr ||
      length != result.size()) {
    base::raise(ErrorKind::kInternal, "HMAC-SHA256 failed", ErrorFamily::kNetwork);
  }
  return result;
}

}  // namespace lockstep::net::internal
