// A device of a worker, as text says it:
//
//   "ps/cuda:1"      cuda:1 of the worker named ps
//   "rank:2/cpu"     the CPU of the worker with number 2; "rank:2" is the same
//   "ps"             the CPU of ps
//   "cuda:0"         a device of this worker: what is a device's name is never taken for a worker's
//
// A value type.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/rpc/worker.h"

namespace lockstep {

class RemoteDevice {
 public:
  // Raises kUsage for anything else, saying what is wrong. Whether the worker exists shows when it is used.
  static RemoteDevice parse(std::string_view text);

  // Nothing: this worker.
  const std::optional<rpc::Worker>& worker() const { return worker_; }
  const c10::Device& device() const { return device_; }
  // As parse reads it, with the device: "ps/cpu".
  std::string text() const;

 private:
  RemoteDevice(std::optional<rpc::Worker> worker, c10::Device device)
      : worker_(std::move(worker)), device_(device) {}

  std::optional<rpc::Worker> worker_;
  c10::Device device_;
};

}  // namespace lockstep
