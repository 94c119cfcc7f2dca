// Plans: who copies, reduces, signals and waits, and in which order, when a collective goes through the
// staging areas. A plan is a pure function of the call and the rank; internal/operation_staged.cpp executes
// it, and plan_test.cpp executes it alone, under random interleavings.
//
// Terms. The buffer is processed in rounds, and the part of one round is cut into one slice per rank. The
// staging areas exist twice, and rounds use them alternately (parity). A rank publishes a phase with kSignal;
// kWait blocks until others have reached one. Why two copies of the areas suffice is explained at each plan.
// Thread safety: pure functions and value types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// Step::peer of a wait for every other rank.
inline constexpr std::int32_t kAllOthers = -1;

enum class StepKind : std::uint8_t {
  kCopyIn,  // own send + user_at -> own stage-in[parity] + stage_at
  kReduce,  // send + user_at of this rank and stage-in[parity] + stage_at of the others -> own recv + recv_at when
            // `keep`, and own stage-out[parity] when `publish`
  kCopyOut,  // peer's stage-out[parity] (stage-in when `from_in`) + stage_at -> own recv + recv_at
  kKeep,     // own send + user_at -> own recv + recv_at
  kSignal,   // publish `phase`
  kWait,     // until `peer`, or each of kAllOthers, has published `phase`
};

struct Step {
  StepKind kind;
  std::uint8_t parity = 0;
  bool keep = true;
  bool publish = false;
  bool from_in = false;
  std::int32_t peer = kAllOthers;
  std::uint32_t phase = 0;
  std::uint64_t user_at = 0;
  std::uint64_t recv_at = 0;
  std::uint64_t stage_at = 0;
  std::uint64_t n_bytes = 0;
};

// The phase of a rank that has finished: every wait for it is satisfied.
inline constexpr std::uint32_t kLastPhase = (1u << 24) - 1;

// What a plan depends on. n_bytes is count * element size, as in lockstep_op_kind: for all_gather, gather,
// reduce_scatter, scatter and all_to_all the part of one rank.
struct PlanInput {
  lockstep_op_kind kind;
  int rank;
  int size;
  int root;
  std::uint64_t n_bytes;
  std::size_t stage_in_bytes;   // one parity
  std::size_t stage_out_bytes;  // one parity
  // The kinds with counts of their own: bytes per peer, in rank order. all_gather_v uses recv_bytes only.
  std::span<const std::uint64_t> send_bytes{};
  std::span<const std::uint64_t> recv_bytes{};
};

// Which bytes go to which rank in a collective that only moves data: this rank's side of it. Offsets are into
// its own buffers.
struct Traffic {
  struct Part {
    std::uint64_t at = 0;
    std::uint64_t n_bytes = 0;
  };
  std::vector<Part> sends;     // one per receiver, this rank included
  std::vector<Part> receives;  // one per sender
  bool shared = false;         // every receiver gets the same bytes of a sender
};
// Empty for the kinds that reduce, and for barrier, send and recv.
Traffic traffic_of(const PlanInput& in);

std::vector<Step> make_plan(const PlanInput& in);

}  // namespace lockstep::comm
