// The device side of a mesh: valid device types, and the device of this process. Private to mesh/.
#pragma once

#include <string>

namespace lockstep::internal {

// Raises kUsage for text that is not a device type, or that has an index ("cuda:0").
void check_device_type(const std::string& device_type);
// See DeviceMesh's constructor; no-op for the CPU. Raises kUnsupported when this libtorch has no such device.
void move_to_own_device(const std::string& device_type);

}  // namespace lockstep::internal
