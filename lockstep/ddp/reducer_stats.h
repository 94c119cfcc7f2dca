// Reduction statistics of a DistributedDataParallel model.
// Thread safety: a value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// Counters since construction; times in seconds.
struct ReducerStats {
  std::uint64_t n_reductions = 0;     // completely reduced backward passes
  std::uint64_t n_bytes_reduced = 0;  // by this rank
  double exposed_seconds = 0;         // spent waiting at the end of backward: communication not overlapped
  double last_exposed_seconds = 0;    // of the last backward pass
  std::uint64_t n_buckets_reduced = 0;
  std::size_t last_n_buckets_reduced = 0;   // of the last backward pass
  std::vector<std::size_t> bucket_bytes{};  // of the current buckets, in the order of reduction
  // Memory held by the reducer itself: buckets that are not the gradients' storage, and free blocks of the
  // pool.
  std::size_t held_bytes = 0;
  bool has_rebuilt_buckets = false;
  std::uint64_t n_in_place = 0;      // gradients reduced in place, where autograd allocated them
  std::uint64_t unused_bytes = 0;    // parameters that this rank did not use in the last reduced pass
  bool can_set_static_graph = true;  // the unused set has never changed
};

}  // namespace lockstep
