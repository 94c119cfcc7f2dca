#include "lockstep/mesh/internal/mesh_device.h"

#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/group/world.h"

namespace lockstep::internal {
namespace {

c10::Device parsed(const std::string& device_type) try {
  return c10::Device(device_type);
} catch (const std::exception&) {
  base::raise(ErrorKind::kUsage,
              base::cat("DeviceMesh: \"", device_type, "\" is not a device type; say \"cpu\" or \"cuda\""));
}

// Which of `n` devices is this process's.
c10::DeviceIndex own_device(const std::string& device_type, int n) {
  if (const auto local = base::environment_int(base::EnvVar::kLocalRank)) {
    if (*local < 0) base::raise(ErrorKind::kUsage, base::cat("DeviceMesh: LOCAL_RANK is ", *local));
    // More ranks than devices share them: slow over NCCL, which may refuse it, but what cuda_ipc is for.
    return static_cast<c10::DeviceIndex>(*local % n);
  }
  const int size = get_world_size();
  if (size > n && size % n != 0) {
    base::raise(ErrorKind::kUsage,
                base::cat("DeviceMesh: ", size, " ranks do not divide by ", n, " ", device_type,
                          " devices per host, and LOCAL_RANK is not set; choose the device of each rank "
                          "before making the mesh"));
  }
  const int device = get_rank() % n;
  base::log(LogLevel::kWarn, base::cat("DeviceMesh: neither a current device nor LOCAL_RANK is set; taking ",
                                       device_type, ":", device, ", the rank modulo the number of devices"));
  return static_cast<c10::DeviceIndex>(device);
}

}  // namespace

void check_device_type(const std::string& device_type) {
  if (parsed(device_type).has_index()) {
    base::raise(ErrorKind::kUsage,
                base::cat("DeviceMesh: \"", device_type, "\" names one device; give the type only, \"",
                          device_type.substr(0, device_type.find(':')), "\""));
  }
}

void move_to_own_device(const std::string& device_type) {
  const auto type = parsed(device_type).type();
  if (type == c10::DeviceType::CPU) return;
  const auto* devices = c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type) : nullptr;
  const int n = devices == nullptr ? 0 : devices->deviceCount();
  if (n == 0) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("DeviceMesh: this process has no ", device_type, " device"));
  }
  if (devices->getDevice().index() != 0) return;  // the user's choice
  devices->setDevice(c10::Device(type, own_device(device_type, n)));
}

}  // namespace lockstep::internal
