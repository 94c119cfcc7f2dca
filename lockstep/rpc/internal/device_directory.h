// The device maps between an agent and each worker it knows.
// Thread safety: every method may be called from any thread.
#pragma once

#include <map>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/rpc/device_map.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc::internal {

class DeviceDirectory {
 public:
  // `own`: for calls of this worker, by callee. Without one for itself, a worker's calls to itself move nothing.
  DeviceDirectory(WorkerInfo self, DeviceMaps own);

  // For calls of `peer` to this worker. Replaces what a worker had that had the number before.
  void set(WorkerId peer, const DeviceMap& map);
  // Raises kUsage when no map leads there.
  int target(const WorkerInfo& to, Leg leg, int index) const;

 private:
  const WorkerInfo self_;
  const DeviceMaps own_;
  mutable base::Mutex mutex_;
  std::map<WorkerId, DeviceMap> of_peers_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::rpc::internal
