// A device of a worker, parsed from text:
//
//   "ps/cuda:1"      cuda:1 of the worker named ps
//   "rank:2/cpu"     the CPU of the worker with number 2; "rank:2" is the same
//   "ps"             the CPU of ps
//   "cuda:0"         a device of this worker: the name of a device is never taken for that of a worker
//
// Thread safety: a value type; const methods may be called concurrently.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/rpc/worker.h"

namespace lockstep {

class RemoteDevice {
 public:
  // Raises kUsage for anything else, saying what is wrong. Whether the worker exists is checked when it is
  // used.
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
