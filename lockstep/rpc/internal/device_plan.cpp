#include "lockstep/rpc/internal/device_plan.h"

#include <algorithm>
#include <set>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::rpc::internal {
namespace {

bool uses(const DevicePlan& plan, int device) {
  return plan.devices.empty() || std::ranges::find(plan.devices, device) != plan.devices.end();
}

void check_ends(const DevicePlan& from, const DevicePlan& to, const DeviceMap& map) {
  const auto refuse = [&](const DevicePlan& whose, int device) {
    base::raise(ErrorKind::kUsage,
                base::cat("init_rpc: device_maps of worker ", from.worker, " for worker ", to.worker,
                          " names cuda:", device, " of ", whose.worker, ", which is not among its devices"));
  };
  for (const auto& [here, there] : map) {
    if (!uses(from, here)) refuse(from, here);
    if (!uses(to, there)) refuse(to, there);
  }
}

}  // namespace

void check_device_map(const std::string& worker, const DeviceMap& map) {
  std::set<int> targets;
  for (const auto& [from, to] : map) {
    if (from < 0 || to < 0)
      base::raise(ErrorKind::kUsage, base::cat("the device map of ", worker, " has a negative device"));
    if (!targets.insert(to).second) {
      base::raise(ErrorKind::kUsage,
                  base::cat("the device map of ", worker, " puts two devices on its device ", to,
                            "; answers could not find their way back"));
    }
  }
}

void check_device_plans(std::span<const DevicePlan> plans) {
  for (const auto& from : plans) {
    for (const auto& [worker, map] : from.maps) {
      const auto to = std::ranges::find(plans, worker, &DevicePlan::worker);
      if (to == plans.end()) {
        base::raise(ErrorKind::kUsage, base::cat("init_rpc: device_maps of worker ", from.worker,
                                                 " has a map for ", worker, ", and no worker has that name"));
      }
      check_ends(from, *to, map);
    }
  }
}

DeviceMap reversed(const DeviceMap& map) {
  DeviceMap back;
  for (const auto& [from, to] : map) back.emplace(to, from);
  return back;
}

int target_device(const DevicePassage& passage, const DeviceMap& map, int index) {
  const bool request = passage.leg == Leg::kRequest;
  const DeviceMap& way = request ? map : reversed(map);
  if (const auto found = way.find(index); found != way.end()) return found->second;
  const auto& caller = request ? passage.from : passage.to;
  const auto& callee = request ? passage.to : passage.from;
  base::raise(ErrorKind::kUsage,
              base::cat("a tensor on cuda:", index, " of worker ", passage.from, " cannot be sent to worker ",
                        passage.to, ": device_maps of ", caller, " for ", callee,
                        request ? " does not map this device" : " maps no device to this one",
                        "; call set_device_map(\"", callee, "\", ...) on the RpcOptions of ", caller,
                        ", or move the tensor to the CPU"));
}

}  // namespace lockstep::rpc::internal
