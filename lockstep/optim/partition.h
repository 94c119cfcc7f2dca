// Assigns each parameter's state to a rank: a pure function of the sizes, so every rank computes the same
// result. Thread safety: no shared state.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// numels[g][i] is the number of elements of parameter i of group g; the result at the same index is the
// owning rank. Group by group, largest first (ties: the earlier one), each goes to the rank with the fewest
// elements so far (ties: the lowest rank). Whole parameters only; a group appended later moves none of the
// earlier ones.
std::vector<std::vector<int>> partition_parameters(const std::vector<std::vector<std::int64_t>>& numels,
                                                   int n_ranks);

}  // namespace lockstep
