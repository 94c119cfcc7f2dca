// Who keeps the state of which parameter: a pure function of the sizes, so that every rank finds the same answer.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// numels[g][i] is the number of elements of parameter i of group g; the result at the same place is the rank that owns
// it. Group by group, the largest first (the earlier one of equals), each goes to the rank that has the fewest
// elements so far (the lowest of equals). Whole parameters only; a group added at the end moves none of the earlier.
std::vector<std::vector<int>> partition_parameters(const std::vector<std::vector<std::int64_t>>& numels,
                                                   int n_ranks);

}  // namespace lockstep
