// The entry device_identity of the engines for CUDA memory.
// Thread safety: functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engines/cuda/driver.h"
#include "lockstep/engine/engine_abi.h"

namespace lockstep::cuda {

// In hexadecimal digits.
std::string to_text(const Uuid& uuid);

// The device's UUID in hexadecimal digits. LOCKSTEP_UNSUPPORTED without a driver or for another kind of device,
// LOCKSTEP_USAGE for a device that does not exist. Never throws.
lockstep_status device_identity(lockstep_device_kind kind, std::int32_t device, char* out,
                                std::size_t capacity);

}  // namespace lockstep::cuda
