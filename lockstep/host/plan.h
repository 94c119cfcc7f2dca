// Plans: who copies, reduces, signals and waits, and in which order, when a collective goes through the staging
// areas. A plan is a pure function of the call and the rank; the runner in internal/operation.cpp executes it, and
// plan_test.cpp executes it alone, under random interleavings.
//
// Terms. The buffer is cut into blocks, a block into one slice per rank. The staging areas exist twice and blocks use
// them in turn (parity). A rank publishes a phase with kSignal; kWait holds until others have reached one.
// Why two copies of the areas suffice is said at each plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

enum class StepKind : std::uint8_t {
  kCopyIn,  // own send + user_at -> own stage-in[parity] + stage_at
  kReduce,  // send + user_at of this rank and stage-in[parity] + stage_at of the others -> own recv + recv_at,
            // and own stage-out[parity] when `publish`
  kCopyOut,  // peer's stage-out[parity] (stage-in when `from_in`) + stage_at -> own recv + recv_at
  kKeep,     // own send + user_at -> own recv + recv_at
  kSignal,   // publish `phase`
  kWait,     // until `peer` (all others when -1) has published `phase`
};

struct Step {
  StepKind kind;
  std::uint8_t parity = 0;
  bool publish = false;
  bool from_in = false;
  std::int32_t peer = -1;
  std::uint32_t phase = 0;
  std::uint64_t user_at = 0;
  std::uint64_t recv_at = 0;
  std::uint64_t stage_at = 0;
  std::uint64_t n_bytes = 0;
};

// What a plan depends on. n_bytes is count * element size, as in lockstep_op_kind: for all_gather and reduce_scatter
// the part of one rank.
struct PlanInput {
  lockstep_op_kind kind;
  int rank;
  int size;
  int root;
  std::uint64_t n_bytes;
  std::size_t stage_in_bytes;   // one parity
  std::size_t stage_out_bytes;  // one parity
};

std::vector<Step> make_plan(const PlanInput& in);

}  // namespace lockstep::comm
