// The device side of a mesh: which types there are, and which device is this process's own. Private to group/.
#pragma once

#include <string>

namespace lockstep::internal {

// Raises kUsage for a text that is no device type, or one with an index ("cuda:0").
void check_device_type(const std::string& device_type);
// As DeviceMesh's constructor says; nothing for the CPU. Raises kUnsupported when libtorch here has no such device.
void move_to_own_device(const std::string& device_type);

}  // namespace lockstep::internal
