// Positions of ranks in an n-dimensional array: pure arithmetic on shapes and coordinates. Private to mesh/.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::internal {

// A value; constant after construction.
class MeshLayout {
 public:
  // `ranks` is row-major, as many as the product of `shape`, without duplicates; `rank` is this process's.
  MeshLayout(std::vector<std::int64_t> shape, std::vector<int> ranks, int rank);

  const std::vector<std::int64_t>& shape() const { return shape_; }
  int rank() const { return rank_; }
  bool has_rank() const { return coordinate_.has_value(); }
  // Ranks along `dims`, the last one fastest, at this rank's other coordinates (0 for a rank outside).
  std::vector<int> ranks_over(const std::vector<int>& dims) const;
  // This rank's index in the merged `dims`, the last one fastest.
  int place_in(const std::vector<int>& dims) const;
  std::int64_t size_of(const std::vector<int>& dims) const;

 private:
  std::vector<std::int64_t> shape_;
  std::vector<int> ranks_;
  int rank_;
  std::optional<std::vector<int>> coordinate_;
};

}  // namespace lockstep::internal
