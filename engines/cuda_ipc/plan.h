// What a collective does on the device, as launches: a pure function of what the ranks called and where their buffers are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engines/cuda_ipc/device.h"
#include "lockstep/engine/engine_abi.h"

namespace lockstep::cuda_ipc {

// One rank's call, with its buffers as the launching process sees them. Null where a rank has none.
struct PlannedCall {
  const void* send = nullptr;
  void* recv = nullptr;
  const std::uint64_t* send_counts = nullptr;  // ALL_TO_ALL_V
};

struct PlannedKind {
  lockstep_op_kind kind;
  lockstep_dtype dtype;
  lockstep_reduce_op reduce;
  int root;
  std::uint64_t count;
  const std::uint64_t* recv_counts;  // ALL_GATHER_V
};

// In the order in which they must run. Empty: nothing is to be done.
std::vector<Launch> plan(const PlannedKind& kind, std::span<const PlannedCall> calls);
// A single copy.
std::vector<Launch> plan_copy(const void* from, void* to, std::uint64_t n_bytes);

// Elements that rank `rank` of `size` reads and writes.
struct Extent {
  std::uint64_t send = 0, recv = 0;
};
Extent extent_of(const lockstep_op& op, int rank, int size);

}  // namespace lockstep::cuda_ipc
