// The cases of sharded.py, run by lockstep: operators on DTensors of the same values and placements, and a
// transformer under the same plans.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/mesh/device_mesh.h"
#include "tests/parity/sharded_record.h"

namespace parity {

// One world's cases on one rank: where tensors come from, and what has been seen. Every call that returns a
// DTensor, or sees one, is collective over the mesh.
class ShardedRun {
 public:
  // `theirs`: torch's placements; what lockstep places differently is redistributed to them.
  ShardedRun(int rank, at::ScalarType dtype, lockstep::DeviceMesh mesh, const PlacementTexts& theirs)
      : rank_(rank), dtype_(dtype), mesh_(std::move(mesh)), theirs_(theirs) {}

  void begin(std::string name) { case_ = std::move(name); }
  const lockstep::DeviceMesh& mesh() const { return mesh_; }
  at::ScalarType dtype() const { return dtype_; }

  at::Tensor plain(std::uint32_t tag, at::IntArrayRef shape) const;
  at::Tensor tensor(std::uint32_t tag, at::IntArrayRef shape, lockstep::Placements placements) const;
  // The same, with a gradient.
  at::Tensor leaf(std::uint32_t tag, at::IntArrayRef shape, lockstep::Placements placements) const;
  // Each rank has its own part.
  at::Tensor partial(std::uint32_t tag, at::IntArrayRef shape, lockstep::Placements placements) const;
  // Whole numbers from 0 to `below`, exclusive.
  static at::Tensor plain_indices(std::uint32_t tag, at::IntArrayRef shape, std::uint32_t below);
  at::Tensor indices(std::uint32_t tag, at::IntArrayRef shape, std::uint32_t below,
                     lockstep::Placements placements) const;

  void see(const std::string& name, const at::Tensor& tensor);
  // Sees the result and the gradients of the leaves when every element of the result has a weight of its own.
  void finish(const at::Tensor& out, const std::vector<std::pair<std::string, at::Tensor>>& leaves = {});
  Sighting take() { return std::move(seen_); }

 private:
  const int rank_;
  const at::ScalarType dtype_;
  const lockstep::DeviceMesh mesh_;
  const PlacementTexts& theirs_;
  std::string case_;
  Sighting seen_;
};

struct ShardedCase {
  std::string name;
  void (*run)(ShardedRun& run);
  bool in_f32 = true;  // and not in f64 only
};

// The cases that one mesh runs, with the mesh's name in the files.
struct ShardedWorld {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<ShardedCase> cases;
  int n_ranks() const;
};

// In the order of sharded.py.
const std::vector<ShardedWorld>& sharded_worlds();
// Runs those of `cases` that are meant for the type, as one of the ranks of the default group. Collective.
Sighting run_sharded(const ShardedWorld& world, const std::vector<ShardedCase>& cases, int rank,
                     at::ScalarType dtype, const PlacementTexts& theirs);

// Two cases of the line gone wrong, of the same names, which every comparison must notice: a partial that
// nobody reduces, by its values, and a result that is right but lies elsewhere, by its placement.
std::vector<ShardedCase> broken_cases();

// The parts sharded_worlds is made of.
std::vector<ShardedCase> operator_cases();
std::vector<ShardedCase> layout_cases();
std::vector<ShardedCase> square_cases();
std::vector<ShardedCase> transformer_cases();

}  // namespace parity
