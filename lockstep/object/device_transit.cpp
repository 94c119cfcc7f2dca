#include "lockstep/object/detail/device_transit.h"

#include <atomic>

namespace lockstep::object {
namespace {

// Relaxed: a function's address publishes no data, and a thread that does not see it yet has met no such tensor.
std::atomic<RecordDeviceEvents> recorder{nullptr};

}  // namespace

std::shared_ptr<DeviceEvents> record_device_events() {
  const auto record = recorder.load(std::memory_order_relaxed);
  return record == nullptr ? nullptr : record();
}

void set_device_event_recorder(RecordDeviceEvents record) noexcept {
  recorder.store(record, std::memory_order_relaxed);
}

}  // namespace lockstep::object
