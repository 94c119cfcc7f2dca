#include "engines/cuda/identity.h"

#include "lockstep/engine/plugin.h"

namespace lockstep::cuda {

std::string to_text(const Uuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

lockstep_status device_identity(lockstep_device_kind kind, std::int32_t device, char* out,
                                std::size_t capacity) {
  if (kind != LOCKSTEP_CUDA) return LOCKSTEP_UNSUPPORTED;
  return comm::guarded(
      [&] {
        std::string why;
        const Driver* const driver = Driver::find(&why);
        if (driver == nullptr) return LOCKSTEP_UNSUPPORTED;
        Device found{};
        Uuid uuid{};
        if (driver->device_get(&found, device) != kSuccess ||
            driver->device_get_uuid(&uuid, found) != kSuccess)
          return LOCKSTEP_USAGE;
        comm::put(out, capacity, to_text(uuid));
        return LOCKSTEP_OK;
      },
      [] { return LOCKSTEP_INTERNAL; });
}

}  // namespace lockstep::cuda
