// Device maps as data: what is wrong with them, and where a tensor goes. Pure functions, apart from any device.
// Thread safety: values; no shared state.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/rpc/device_map.h"

namespace lockstep::rpc::internal {

// What a worker tells the others of its GPUs.
struct DevicePlan {
  std::string worker{};
  DeviceMaps maps{};
  std::vector<int> devices{};  // that it uses; empty: any
};

// Raises kUsage for a negative device, and for two that are put on one.
void check_device_map(const std::string& worker, const DeviceMap& map);
// Of all workers of a group, checked alike by each: raises kUsage when a map is for a worker that does not exist, or
// names a device that the worker at its end does not use.
void check_device_plans(std::span<const DevicePlan> plans);

// Pre: check_device_map(map).
DeviceMap reversed(const DeviceMap& map);

// Where a tensor goes that is on cuda:`index` of `from`, in a message to `to`. `map` is that of the caller for the
// callee, whichever of the two sends. Raises kUsage naming the device, both workers and the option.
struct DevicePassage {
  const std::string& from;
  const std::string& to;
  Leg leg;
};
int target_device(const DevicePassage& passage, const DeviceMap& map, int index);

}  // namespace lockstep::rpc::internal
