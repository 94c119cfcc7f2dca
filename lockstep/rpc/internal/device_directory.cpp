#include "lockstep/rpc/internal/device_directory.h"

#include <utility>

#include "lockstep/rpc/internal/device_plan.h"

namespace lockstep::rpc::internal {

DeviceDirectory::DeviceDirectory(WorkerInfo self, DeviceMaps own)
    : self_(std::move(self)), own_(std::move(own)) {}

void DeviceDirectory::set(WorkerId peer, const DeviceMap& map) {
  const base::MutexLock lock(mutex_);
  of_peers_[peer] = map;
}

// The map is always the caller's: this worker's own on a request, the receiver's on an answer.
int DeviceDirectory::target(const WorkerInfo& to, Leg leg, int index) const {
  const bool here = to.id == self_.id;
  DeviceMap map;
  if (leg == Leg::kRequest || here) {
    const auto own = own_.find(to.name);
    if (own != own_.end()) map = own->second;
    if (here && own == own_.end()) return index;
  } else {
    const base::MutexLock lock(mutex_);
    const auto theirs = of_peers_.find(to.id);
    if (theirs != of_peers_.end()) map = theirs->second;
  }
  return target_device({.from = self_.name, .to = to.name, .leg = leg}, map, index);
}

}  // namespace lockstep::rpc::internal
