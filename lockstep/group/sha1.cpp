#include "lockstep/group/detail/sha1.h"

#include <openssl/evp.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {

std::string sha1(const std::string& text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (EVP_Digest(text.data(), text.size(), digest, &length, EVP_sha1(), nullptr) != 1) {
    base::raise(ErrorKind::kInternal, "SHA-1 failed");
  }
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
  }
  return hex;
}

}  // namespace lockstep::internal
