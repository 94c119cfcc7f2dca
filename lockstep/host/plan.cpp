#include "lockstep/host/plan.h"

#include <algorithm>

namespace lockstep::comm {
namespace {

constexpr std::uint64_t kAlign = 64;  // slices start on cache lines, and on whole elements of every type
// Keeps what is copied and reduced at a time within a core's cache, however large the areas are.
constexpr std::uint64_t kMaxSlice = 256 << 10;

std::uint64_t align_up(std::uint64_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

// Bytes of a slice so that one per rank fits the staging areas.
// A rank lays out one slice per rank in stage-in, but stage-out holds only its own reduced one: hence the two
// bounds. At least one cache line, so that a plan makes progress even with areas smaller than one line per
// rank.
std::uint64_t slice_bytes(const PlanInput& in) {
  const std::uint64_t fits =
      std::min<std::uint64_t>(in.stage_in_bytes / static_cast<std::uint64_t>(in.size), in.stage_out_bytes);
  return std::max<std::uint64_t>(std::min(fits, kMaxSlice) / kAlign * kAlign, kAlign);
}

std::uint64_t rounds_of(std::uint64_t n_bytes, std::uint64_t round_bytes) {
  return (n_bytes + round_bytes - 1) / round_bytes;
}

// A round of an all-reduce: [at, at + n_bytes) in `size` slices of `slice` bytes, the last ones short or
// empty.
struct Round {
  std::uint64_t at, n_bytes, slice;
  std::uint8_t parity;
  std::uint64_t begin(int rank) const {
    return at + std::min(n_bytes, slice * static_cast<std::uint64_t>(rank));
  }
  std::uint64_t length(int rank) const { return std::min(at + n_bytes, begin(rank) + slice) - begin(rank); }
};

// The last round is usually short. It is divided evenly again, instead of into full slices of which the last
// ranks get nothing: otherwise a few ranks would reduce it while the others wait. Pre: index < number of
// rounds.
Round round_of(const PlanInput& in, std::uint64_t slice, std::uint64_t index) {
  const std::uint64_t full = slice * static_cast<std::uint64_t>(in.size);
  const std::uint64_t at = index * full;
  const std::uint64_t n_bytes = std::min(full, in.n_bytes - at);
  const std::uint64_t even =
      align_up((n_bytes + static_cast<std::uint64_t>(in.size) - 1) / static_cast<std::uint64_t>(in.size));
  return {at, n_bytes, even, static_cast<std::uint8_t>(index & 1)};
}

// Phase p+1 of a rank says: my round p is laid out, and my slice of round p-1 is reduced. So whoever has seen
// phase p+1 of all may read round p's inputs and round p-1's results, and may overwrite its own inputs of
// round p-1 (all have reduced it) and its own results of round p-2 (all have copied them before publishing
// phase p+1): two copies. A reduce is the same, but that only the root takes the results.
std::vector<Step> all_reduce(const PlanInput& in) {
  std::vector<Step> plan;
  const bool takes = in.kind == LOCKSTEP_ALL_REDUCE || in.rank == in.root;
  const std::uint64_t slice = slice_bytes(in);
  const std::uint64_t n_rounds = rounds_of(in.n_bytes, slice * static_cast<std::uint64_t>(in.size));
  // The own slice is not laid out: this rank reduces it from its buffer, and nobody else reads it.
  const auto copy_in = [&](const Round& b) {
    for (int r = 0; r < in.size; ++r) {
      if (r == in.rank || b.length(r) == 0) continue;
      plan.push_back({.kind = StepKind::kCopyIn,
                      .parity = b.parity,
                      .user_at = b.begin(r),
                      .stage_at = b.begin(r) - b.at,
                      .n_bytes = b.length(r)});
    }
  };
  const auto copy_out = [&](const Round& b) {
    for (int r = 0; r < in.size; ++r) {
      if (!takes || r == in.rank || b.length(r) == 0) continue;
      plan.push_back({.kind = StepKind::kCopyOut,
                      .parity = b.parity,
                      .peer = r,
                      .recv_at = b.begin(r),
                      .n_bytes = b.length(r)});
    }
  };
  // Steady state: while a rank reduces round i it also copies out round i-1 and lays out round i+1, so ranks
  // wait for each other once per round.
  copy_in(round_of(in, slice, 0));
  plan.push_back({.kind = StepKind::kSignal, .phase = 1});
  for (std::uint64_t i = 0; i < n_rounds; ++i) {
    const Round b = round_of(in, slice, i);
    plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(i + 1)});
    if (i > 0) copy_out(round_of(in, slice, i - 1));
    if (b.length(in.rank) > 0) {
      plan.push_back({.kind = StepKind::kReduce,
                      .parity = b.parity,
                      .keep = takes,
                      .publish = true,
                      .user_at = b.begin(in.rank),
                      .recv_at = b.begin(in.rank),
                      .stage_at = b.begin(in.rank) - b.at,
                      .n_bytes = b.length(in.rank)});
    }
    if (i + 1 < n_rounds) copy_in(round_of(in, slice, i + 1));
    plan.push_back({.kind = StepKind::kSignal, .phase = static_cast<std::uint32_t>(i + 2)});
  }
  // No signal after the last copy_out: a rank lays out for the next operation only when all ranks have
  // entered it, that is, have finished this plan.
  plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(n_rounds + 1)});
  copy_out(round_of(in, slice, n_rounds - 1));
  return plan;
}

// As all_reduce without results to hand out: phase i+1 says round i is laid out and round i-1 reduced.
std::vector<Step> reduce_scatter(const PlanInput& in) {
  std::vector<Step> plan;
  const std::uint64_t slice = slice_bytes(in);
  const std::uint64_t n_rounds = rounds_of(in.n_bytes, slice);
  const auto copy_in = [&](std::uint64_t i) {
    for (int r = 0; r < in.size; ++r) {
      if (r == in.rank) continue;
      plan.push_back({.kind = StepKind::kCopyIn,
                      .parity = static_cast<std::uint8_t>(i & 1),
                      .user_at = static_cast<std::uint64_t>(r) * in.n_bytes + i * slice,
                      .stage_at = static_cast<std::uint64_t>(r) * slice,
                      .n_bytes = std::min(slice, in.n_bytes - i * slice)});
    }
    plan.push_back({.kind = StepKind::kSignal, .phase = static_cast<std::uint32_t>(i + 1)});
  };
  copy_in(0);
  for (std::uint64_t i = 0; i < n_rounds; ++i) {
    plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(i + 1)});
    plan.push_back({.kind = StepKind::kReduce,
                    .parity = static_cast<std::uint8_t>(i & 1),
                    .user_at = static_cast<std::uint64_t>(in.rank) * in.n_bytes + i * slice,
                    .recv_at = i * slice,
                    .stage_at = static_cast<std::uint64_t>(in.rank) * slice,
                    .n_bytes = std::min(slice, in.n_bytes - i * slice)});
    if (i + 1 < n_rounds) copy_in(i + 1);
  }
  // The next operation may lay out at once: it begins when all have entered it, hence have finished this one.
  return plan;
}

// Moving bytes. In round i a rank lays out the i-th slice for every receiver, one after the other, or one
// slice for all when they get the same. Phase i+1 says: my slices of round i are laid out, and I have taken
// everything of earlier rounds that was for me. So round i may take the place of round i-2 once those it was
// for have reached phase i. A rank that has laid out and taken everything says so once and for all.
std::vector<Step> exchange(const PlanInput& in) {
  const Traffic traffic = traffic_of(in);
  const auto size = static_cast<std::uint64_t>(in.size), me = static_cast<std::uint64_t>(in.rank);
  // Receivers of different bytes each have a fixed part of the area; receivers of the same bytes read one
  // slice, which may then be as large as the area.
  const std::uint64_t share = traffic.shared ? in.stage_in_bytes : in.stage_in_bytes / size;
  const std::uint64_t slice =
      std::max<std::uint64_t>(std::min<std::uint64_t>(share, kMaxSlice) / kAlign * kAlign, kAlign);
  // Bytes of `part` that belong to a round. Sender and receiver compute it from the same length, so a round
  // in which one of them has nothing for the other is skipped by both.
  const auto left = [&](const Traffic::Part& part, std::uint64_t round) {
    return part.n_bytes > round * slice ? std::min(slice, part.n_bytes - round * slice) : 0;
  };
  // This rank's own number: ranks that send and receive less have fewer rounds, and kLastPhase satisfies
  // whoever waits for a later one.
  std::uint64_t n_rounds = 0;
  for (std::uint64_t r = 0; r < size; ++r) {
    if (r == me) continue;
    n_rounds = std::max({n_rounds, rounds_of(traffic.sends[r].n_bytes, slice),
                         rounds_of(traffic.receives[r].n_bytes, slice)});
  }
  std::vector<Step> plan;
  const auto peer = [](std::uint64_t r) { return static_cast<std::int32_t>(r); };
  // First wait until the receivers of the old content have taken it; ranks that got nothing in that round are
  // not waited for.
  const auto lay_out = [&](std::uint64_t round) {
    for (std::uint64_t r = 0; r < size; ++r) {
      if (round < 2 || r == me || left(traffic.sends[r], round - 2) == 0) continue;
      plan.push_back({.kind = StepKind::kWait, .peer = peer(r), .phase = static_cast<std::uint32_t>(round)});
    }
    for (std::uint64_t r = 0; r < size; ++r) {
      if (r == me || left(traffic.sends[r], round) == 0) continue;
      plan.push_back({.kind = StepKind::kCopyIn,
                      .parity = static_cast<std::uint8_t>(round & 1),
                      .user_at = traffic.sends[r].at + round * slice,
                      .stage_at = traffic.shared ? 0 : r * slice,
                      .n_bytes = left(traffic.sends[r], round)});
      // One copy serves all receivers: the first receiver's part is everybody's.
      if (traffic.shared) break;
    }
  };
  const auto take = [&](std::uint64_t round) {
    for (std::uint64_t step = 1; step < size; ++step) {
      const std::uint64_t r = (me + step) % size;  // not all from the same rank at once
      if (left(traffic.receives[r], round) == 0) continue;
      plan.push_back(
          {.kind = StepKind::kWait, .peer = peer(r), .phase = static_cast<std::uint32_t>(round + 1)});
      plan.push_back({.kind = StepKind::kCopyOut,
                      .parity = static_cast<std::uint8_t>(round & 1),
                      .from_in = true,
                      .peer = peer(r),
                      .recv_at = traffic.receives[r].at + round * slice,
                      .stage_at = traffic.shared ? 0 : me * slice,
                      .n_bytes = left(traffic.receives[r], round)});
    }
  };
  for (std::uint64_t round = 0; round < n_rounds; ++round) {
    lay_out(round);
    plan.push_back({.kind = StepKind::kSignal, .phase = static_cast<std::uint32_t>(round + 1)});
    // What stays here is copied once the others can begin.
    if (round == 0 && traffic.receives[me].n_bytes > 0) {
      plan.push_back({.kind = StepKind::kKeep,
                      .user_at = traffic.sends[me].at,
                      .recv_at = traffic.receives[me].at,
                      .n_bytes = traffic.receives[me].n_bytes});
    }
    take(round);
  }
  // Nothing is exchanged (a world of one, or counts of 0), but a rank may still send to itself.
  if (n_rounds == 0 && traffic.receives[me].n_bytes > 0) {
    plan.push_back({.kind = StepKind::kKeep,
                    .user_at = traffic.sends[me].at,
                    .recv_at = traffic.receives[me].at,
                    .n_bytes = traffic.receives[me].n_bytes});
  }
  plan.push_back({.kind = StepKind::kSignal, .phase = kLastPhase});
  return plan;
}

// Fills `parts` with parts of the given lengths, one after the other.
void pack(std::vector<Traffic::Part>& parts, std::span<const std::uint64_t> n_bytes) {
  std::uint64_t at = 0;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    parts[r] = {at, n_bytes[r]};
    at += n_bytes[r];
  }
}

}  // namespace

Traffic traffic_of(const PlanInput& in) {
  const auto size = static_cast<std::size_t>(in.size), me = static_cast<std::size_t>(in.rank);
  const auto root = static_cast<std::size_t>(in.root);
  Traffic traffic{.sends = std::vector<Traffic::Part>(size), .receives = std::vector<Traffic::Part>(size)};
  const std::vector<std::uint64_t> even(size, in.n_bytes);
  switch (in.kind) {
    case LOCKSTEP_BROADCAST:
      traffic.shared = true;
      if (me == root) traffic.sends.assign(size, {0, in.n_bytes});
      traffic.receives[root] = {0, in.n_bytes};
      break;
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_ALL_GATHER_V: {
      const auto lengths =
          in.kind == LOCKSTEP_ALL_GATHER ? std::span<const std::uint64_t>(even) : in.recv_bytes;
      traffic.shared = true;
      traffic.sends.assign(size, {0, lengths[me]});
      pack(traffic.receives, lengths);
      break;
    }
    // Shared although there is one receiver: its slice may then take the whole area instead of one rank's
    // part of it.
    case LOCKSTEP_GATHER:
      traffic.shared = true;
      traffic.sends[root] = {0, in.n_bytes};
      if (me == root) pack(traffic.receives, even);
      break;
    case LOCKSTEP_SCATTER:
      if (me == root) pack(traffic.sends, even);
      traffic.receives[root] = {0, in.n_bytes};
      break;
    case LOCKSTEP_ALL_TO_ALL:
      pack(traffic.sends, even);
      pack(traffic.receives, even);
      break;
    case LOCKSTEP_ALL_TO_ALL_V:
      pack(traffic.sends, in.send_bytes);
      pack(traffic.receives, in.recv_bytes);
      break;
    default:
      break;
  }
  return traffic;
}

std::vector<Step> make_plan(const PlanInput& in) {
  switch (in.kind) {
    case LOCKSTEP_ALL_REDUCE:
    case LOCKSTEP_REDUCE:
      return in.n_bytes == 0 ? std::vector<Step>() : all_reduce(in);
    case LOCKSTEP_REDUCE_SCATTER:
      return in.n_bytes == 0 ? std::vector<Step>() : reduce_scatter(in);
    case LOCKSTEP_BROADCAST:
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_ALL_GATHER_V:
    case LOCKSTEP_GATHER:
    case LOCKSTEP_SCATTER:
    case LOCKSTEP_ALL_TO_ALL:
    case LOCKSTEP_ALL_TO_ALL_V:
      return exchange(in);
    default:
      return {};
  }
}

}  // namespace lockstep::comm
