// Which part of a tensor each rank of a mesh holds: arithmetic on sizes, no tensors. Thread safety: pure
// functions.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/dtensor/placement.h"

namespace lockstep::dtensor_internal {

using Sizes = std::vector<std::int64_t>;

struct Range {
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

// Piece `index` of `size` elements cut into `n` by torch's chunk rule.
inline Range chunk(std::int64_t size, std::int64_t n, std::int64_t index) {
  const auto piece = (size + n - 1) / n;
  const auto offset = std::min(index * piece, size);
  return {offset, std::min(piece, size - offset)};
}
// No piece is shorter than another.
inline bool divides_evenly(std::int64_t size, std::int64_t n) {
  return size % n == 0;
}
// Every rank holds at least one element.
inline bool leaves_none_empty(std::int64_t size, std::int64_t n) {
  return chunk(size, n, n - 1).length > 0;
}

// The sizes of the piece of the rank at `coordinate`.
Sizes local_sizes(Sizes sizes, const Placements& placements, const Sizes& mesh_shape,
                  const Sizes& coordinate);
// The sizes after the placements of the mesh dimensions before `mesh_dim` only: what placement `mesh_dim`
// cuts.
Sizes sizes_before(Sizes sizes, const Placements& placements, const Sizes& mesh_shape,
                   const Sizes& coordinate, std::size_t mesh_dim);

}  // namespace lockstep::dtensor_internal
