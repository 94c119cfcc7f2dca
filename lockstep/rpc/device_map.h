// Which GPU of one worker stands for which of another, in RpcOptions::device_maps: a tensor on cuda:i of the caller arrives
// on the device that its map for the callee names, and results take the way back. Tensors on the CPU need no map.
//
//   worker0: device_maps = {{"worker1", {{0, 1}}}}
//   request  worker0 cuda:0 -> worker1 cuda:1
//   answer   worker1 cuda:1 -> worker0 cuda:0
//
// So two maps may be between two workers, one for the calls of each. Gradients go back on the leg opposite to that of
// their tensor. Thread safety: values.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace lockstep::rpc {

// Of this worker's GPUs to another's, one to one: {0: 1} puts what is on cuda:0 here on cuda:1 there.
using DeviceMap = std::map<int, int>;
using DeviceMaps = std::map<std::string, DeviceMap>;  // by worker

// A message's part in a call.
enum class Leg : std::uint8_t { kRequest, kAnswer };
inline Leg opposite(Leg leg) {
  return leg == Leg::kRequest ? Leg::kAnswer : Leg::kRequest;
}

}  // namespace lockstep::rpc
