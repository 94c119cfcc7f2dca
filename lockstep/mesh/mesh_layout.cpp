#include "lockstep/mesh/internal/mesh_layout.h"

#include <algorithm>

namespace lockstep::internal {

MeshLayout::MeshLayout(std::vector<std::int64_t> shape, std::vector<int> ranks, int rank)
    : shape_(std::move(shape)), ranks_(std::move(ranks)), rank_(rank) {
  const auto found = std::ranges::find(ranks_, rank_);
  if (found == ranks_.end()) return;
  auto place = static_cast<std::int64_t>(found - ranks_.begin());
  coordinate_.emplace(shape_.size());
  for (std::size_t d = shape_.size(); d-- > 0; place /= shape_[d])
    (*coordinate_)[d] = static_cast<int>(place % shape_[d]);
}

std::vector<int> MeshLayout::ranks_over(const std::vector<int>& dims) const {
  std::vector<std::int64_t> steps(shape_.size(), 1);
  for (std::size_t d = steps.size() - 1; d-- > 0;) steps[d] = steps[d + 1] * shape_[d + 1];
  std::int64_t origin = 0;
  for (std::size_t d = 0; coordinate_ && d < steps.size(); ++d) {
    if (std::ranges::count(dims, static_cast<int>(d)) == 0) origin += (*coordinate_)[d] * steps[d];
  }
  std::vector<std::int64_t> places = {origin};
  for (const int dim : dims) {
    const auto d = static_cast<std::size_t>(dim);
    std::vector<std::int64_t> next;
    for (const auto place : places) {
      for (std::int64_t i = 0; i < shape_[d]; ++i) next.push_back(place + i * steps[d]);
    }
    places = std::move(next);
  }
  std::vector<int> ranks;
  for (const auto place : places) ranks.push_back(ranks_[static_cast<std::size_t>(place)]);
  return ranks;
}

int MeshLayout::place_in(const std::vector<int>& dims) const {
  std::int64_t place = 0;
  for (const int dim : dims) {
    const auto d = static_cast<std::size_t>(dim);
    place = place * shape_[d] + (coordinate_ ? (*coordinate_)[d] : 0);
  }
  return static_cast<int>(place);
}

std::int64_t MeshLayout::size_of(const std::vector<int>& dims) const {
  std::int64_t size = 1;
  for (const int dim : dims) size *= shape_[static_cast<std::size_t>(dim)];
  return size;
}

}  // namespace lockstep::internal
