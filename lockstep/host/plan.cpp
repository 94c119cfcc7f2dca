#include "lockstep/host/plan.h"

#include <algorithm>

namespace lockstep::comm {
namespace {

constexpr std::uint64_t kAlign = 64;  // slices start on cache lines, and on whole elements of every type
constexpr std::uint64_t kMaxSlice = 256 << 10;

std::uint64_t align_up(std::uint64_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

// Bytes of a slice so that one per rank fits the staging areas.
std::uint64_t slice_bytes(const PlanInput& in) {
  const std::uint64_t fits =
      std::min<std::uint64_t>(in.stage_in_bytes / static_cast<std::uint64_t>(in.size), in.stage_out_bytes);
  return std::max<std::uint64_t>(std::min(fits, kMaxSlice) / kAlign * kAlign, kAlign);
}

std::uint64_t blocks_of(std::uint64_t n_bytes, std::uint64_t block) {
  return (n_bytes + block - 1) / block;
}

// A block of an all-reduce: [at, at + n_bytes) in `size` slices of `slice` bytes, the last ones short or empty.
struct Block {
  std::uint64_t at, n_bytes, slice;
  std::uint8_t parity;
  std::uint64_t begin(int rank) const {
    return at + std::min(n_bytes, slice * static_cast<std::uint64_t>(rank));
  }
  std::uint64_t length(int rank) const { return std::min(at + n_bytes, begin(rank) + slice) - begin(rank); }
};

Block block_of(const PlanInput& in, std::uint64_t slice, std::uint64_t index) {
  const std::uint64_t full = slice * static_cast<std::uint64_t>(in.size);
  const std::uint64_t at = index * full;
  const std::uint64_t n_bytes = std::min(full, in.n_bytes - at);
  const std::uint64_t even =
      align_up((n_bytes + static_cast<std::uint64_t>(in.size) - 1) / static_cast<std::uint64_t>(in.size));
  return {at, n_bytes, even, static_cast<std::uint8_t>(index & 1)};
}

// Phase p+1 of a rank says: my block p is laid out, and my slice of block p-1 is reduced. So whoever has seen phase
// p+1 of all may read block p's inputs and block p-1's results, and may overwrite its own inputs of block p-1 (all
// have reduced it) and its own results of block p-2 (all have copied them before publishing phase p+1): two copies.
std::vector<Step> all_reduce(const PlanInput& in) {
  std::vector<Step> plan;
  const std::uint64_t slice = slice_bytes(in);
  const std::uint64_t n_blocks = blocks_of(in.n_bytes, slice * static_cast<std::uint64_t>(in.size));
  const auto copy_in = [&](const Block& b) {
    for (int r = 0; r < in.size; ++r) {
      if (r == in.rank || b.length(r) == 0) continue;
      plan.push_back({.kind = StepKind::kCopyIn,
                      .parity = b.parity,
                      .user_at = b.begin(r),
                      .stage_at = b.begin(r) - b.at,
                      .n_bytes = b.length(r)});
    }
  };
  const auto copy_out = [&](const Block& b) {
    for (int r = 0; r < in.size; ++r) {
      if (r == in.rank || b.length(r) == 0) continue;
      plan.push_back({.kind = StepKind::kCopyOut,
                      .parity = b.parity,
                      .peer = r,
                      .recv_at = b.begin(r),
                      .n_bytes = b.length(r)});
    }
  };
  copy_in(block_of(in, slice, 0));
  plan.push_back({.kind = StepKind::kSignal, .phase = 1});
  for (std::uint64_t i = 0; i < n_blocks; ++i) {
    const Block b = block_of(in, slice, i);
    plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(i + 1)});
    if (i > 0) copy_out(block_of(in, slice, i - 1));
    if (b.length(in.rank) > 0) {
      plan.push_back({.kind = StepKind::kReduce,
                      .parity = b.parity,
                      .publish = true,
                      .user_at = b.begin(in.rank),
                      .recv_at = b.begin(in.rank),
                      .stage_at = b.begin(in.rank) - b.at,
                      .n_bytes = b.length(in.rank)});
    }
    if (i + 1 < n_blocks) copy_in(block_of(in, slice, i + 1));
    plan.push_back({.kind = StepKind::kSignal, .phase = static_cast<std::uint32_t>(i + 2)});
  }
  plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(n_blocks + 1)});
  copy_out(block_of(in, slice, n_blocks - 1));
  return plan;
}

// As all_reduce without results to hand out: phase i+1 says block i is laid out and block i-1 reduced.
std::vector<Step> reduce_scatter(const PlanInput& in) {
  std::vector<Step> plan;
  const std::uint64_t slice = slice_bytes(in);
  const std::uint64_t n_blocks = blocks_of(in.n_bytes, slice);
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
  for (std::uint64_t i = 0; i < n_blocks; ++i) {
    plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(i + 1)});
    plan.push_back({.kind = StepKind::kReduce,
                    .parity = static_cast<std::uint8_t>(i & 1),
                    .user_at = static_cast<std::uint64_t>(in.rank) * in.n_bytes + i * slice,
                    .recv_at = i * slice,
                    .stage_at = static_cast<std::uint64_t>(in.rank) * slice,
                    .n_bytes = std::min(slice, in.n_bytes - i * slice)});
    if (i + 1 < n_blocks) copy_in(i + 1);
  }
  // The next operation may lay out at once: it begins when all have entered it, hence have finished this one.
  return plan;
}

// Phase i+1 says: my block i is laid out and everyone's block i-1 is with me.
std::vector<Step> all_gather(const PlanInput& in) {
  std::vector<Step> plan;
  const std::uint64_t block = std::min<std::uint64_t>(in.stage_in_bytes, kMaxSlice);
  const std::uint64_t n_blocks = blocks_of(in.n_bytes, block);
  const auto mine = static_cast<std::uint64_t>(in.rank) * in.n_bytes;
  plan.push_back({.kind = StepKind::kKeep, .recv_at = mine, .n_bytes = in.n_bytes});
  const auto copy_in = [&](std::uint64_t i) {
    plan.push_back({.kind = StepKind::kCopyIn,
                    .parity = static_cast<std::uint8_t>(i & 1),
                    .user_at = i * block,
                    .n_bytes = std::min(block, in.n_bytes - i * block)});
    plan.push_back({.kind = StepKind::kSignal, .phase = static_cast<std::uint32_t>(i + 1)});
  };
  copy_in(0);
  for (std::uint64_t i = 0; i < n_blocks; ++i) {
    plan.push_back({.kind = StepKind::kWait, .phase = static_cast<std::uint32_t>(i + 1)});
    for (int r = 0; r < in.size; ++r) {
      if (r == in.rank) continue;
      plan.push_back({.kind = StepKind::kCopyOut,
                      .parity = static_cast<std::uint8_t>(i & 1),
                      .from_in = true,
                      .peer = r,
                      .recv_at = static_cast<std::uint64_t>(r) * in.n_bytes + i * block,
                      .n_bytes = std::min(block, in.n_bytes - i * block)});
    }
    if (i + 1 < n_blocks) copy_in(i + 1);
  }
  return plan;
}

// Root's phase i+1: block i is laid out. Another's phase i+1: it has block i. The root lays out block i once all have
// block i-2, whose place it takes.
std::vector<Step> broadcast(const PlanInput& in) {
  std::vector<Step> plan;
  const std::uint64_t block = std::min<std::uint64_t>(in.stage_in_bytes, kMaxSlice);
  const std::uint64_t n_blocks = blocks_of(in.n_bytes, block);
  for (std::uint64_t i = 0; i < n_blocks; ++i) {
    const auto parity = static_cast<std::uint8_t>(i & 1);
    const auto phase = static_cast<std::uint32_t>(i + 1);
    const std::uint64_t n_bytes = std::min(block, in.n_bytes - i * block);
    if (in.rank == in.root) {
      if (i >= 2) plan.push_back({.kind = StepKind::kWait, .phase = phase - 2});
      plan.push_back({.kind = StepKind::kCopyIn, .parity = parity, .user_at = i * block, .n_bytes = n_bytes});
    } else {
      plan.push_back({.kind = StepKind::kWait, .peer = in.root, .phase = phase});
      plan.push_back({.kind = StepKind::kCopyOut,
                      .parity = parity,
                      .from_in = true,
                      .peer = in.root,
                      .recv_at = i * block,
                      .n_bytes = n_bytes});
    }
    plan.push_back({.kind = StepKind::kSignal, .phase = phase});
  }
  return plan;
}

}  // namespace

std::vector<Step> make_plan(const PlanInput& in) {
  if (in.n_bytes == 0) return {};
  switch (in.kind) {
    case LOCKSTEP_ALL_REDUCE:
      return all_reduce(in);
    case LOCKSTEP_REDUCE_SCATTER:
      return reduce_scatter(in);
    case LOCKSTEP_ALL_GATHER:
      return all_gather(in);
    case LOCKSTEP_BROADCAST:
      return broadcast(in);
    default:
      break;
  }
  return {};
}

}  // namespace lockstep::comm
