#include "lockstep/optim/partition.h"

#include <algorithm>
#include <numeric>

namespace lockstep {

std::vector<std::vector<int>> partition_parameters(const std::vector<std::vector<std::int64_t>>& numels,
                                                   int n_ranks) {
  std::vector<std::vector<int>> owners;
  std::vector<std::int64_t> loads(static_cast<std::size_t>(n_ranks), 0);
  for (const auto& group : numels) {
    std::vector<std::size_t> order(group.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return group[a] > group[b]; });
    auto& owner = owners.emplace_back(group.size());
    for (const auto i : order) {
      const auto least = std::min_element(loads.begin(), loads.end());
      *least += group[i];
      owner[i] = static_cast<int>(least - loads.begin());
    }
  }
  return owners;
}

}  // namespace lockstep
