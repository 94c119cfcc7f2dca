// Schedules: of which operations of sub-communicators an operation of the whole group is made, and which
// waits for which. A pure function of the call and the topology; internal/hierarchical_communicator.cpp
// carries it out.
//
// Every rank posts its steps to a sub-communicator in the order they have here, a step once those it needs
// are over. The order per sub-communicator is the same on all its ranks, whatever the timing, so its
// operations match.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/engine/engine_abi.h"
#include "lockstep/hierarchy/internal/topology.h"

namespace lockstep::comm::hierarchy {

enum class Where : std::uint8_t { kLocal, kLane, kFlat };
inline constexpr int kSubCommunicators = 3;

struct Step {
  Where where;
  lockstep_op op;          // what is posted
  std::vector<int> needs;  // earlier steps that must be over
  // Runs right before posting, when `needs` are over: moves bytes between the caller's buffers and scratch.
  std::function<void()> before = nullptr;
  std::vector<std::uint64_t> send_counts = {}, recv_counts = {};  // op points here once it is in place
};

struct Schedule {
  std::vector<Step> steps;
  std::function<void()> at_end = nullptr;     // when all steps are over
  std::vector<std::shared_ptr<void>> memory;  // scratch, freed with the schedule
};

// Gives scratch memory, from the local engine where it has some.
using Scratch = std::function<std::shared_ptr<void>(std::size_t n_bytes)>;

// Above this a collective moves in chunks of about this many bytes, so that local steps overlap with the
// network.
inline constexpr std::uint64_t kChunkBytes = 1 << 20;
// Up to this, every rank carries the whole of an all-reduce over its lane: one local step less.
inline constexpr std::uint64_t kSmallBytes = 16 << 10;

// Pre: the call was checked. Pointers of `op` must live until the schedule is over, counts and `where` too.
Schedule make_schedule(const lockstep_op& op, const Topology& topology, const Scratch& scratch);

}  // namespace lockstep::comm::hierarchy
