// How a tensor is laid out along one dimension of a mesh: Shard(dim), Replicate() or Partial(op). A sharded
// tensor has one placement per mesh dimension.
//
//   {Shard(0), Replicate()}   // rows cut over the first mesh dimension, copies over the second
//
// Shard follows torch's chunk rule: pieces of ceil(size / n), so the last ones may be shorter or empty. Two
// mesh dimensions may shard one tensor dimension: the later one cuts the pieces of the earlier one. Partial:
// every rank holds a tensor of the full size, and the value is the reduction of all of them. Thread safety:
// values.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "lockstep/collective/reduce_op.h"

namespace lockstep {

class Placement {
 public:
  // Replicated.
  Placement() = default;

  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(std::int64_t dim) const { return is_shard() && dim_ == dim; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  // Of a shard. Negative only before it is given to a call, which counts from the tensor's end.
  std::int64_t dim() const { return dim_; }
  // Of a shard: the dimension is read as `interleave` blocks and each of them is cut. 1 for what users write;
  // a view that merges a sharded dimension into an outer one produces the others ([4, 6] sharded on 1, viewed
  // as [24]).
  std::int64_t interleave() const { return interleave_; }
  // Of a partial.
  ReduceOp::Kind op() const { return op_; }

  friend bool operator==(const Placement&, const Placement&) = default;

 protected:
  enum class Kind : std::uint8_t { kReplicate, kShard, kPartial };
  Placement(Kind kind, std::int64_t dim, std::int64_t interleave, ReduceOp::Kind op)
      : kind_(kind), op_(op), dim_(static_cast<std::int32_t>(dim)), interleave_(interleave) {}

 private:
  Kind kind_ = Kind::kReplicate;
  ReduceOp::Kind op_ = ReduceOp::kSum;
  std::int32_t dim_ = 0;
  std::int64_t interleave_ = 1;
};

// The three kinds. They add nothing to Placement, so that copying one into a Placement loses nothing.
struct Replicate : Placement {
  Replicate() = default;
};
struct Shard : Placement {
  explicit Shard(std::int64_t dim, std::int64_t interleave = 1)
      : Placement(Kind::kShard, dim, interleave, ReduceOp::kSum) {}
};
struct Partial : Placement {
  // Every op but kPremulSum.
  explicit Partial(ReduceOp::Kind op = ReduceOp::kSum) : Placement(Kind::kPartial, 0, 1, op) {}
};

using Placements = std::vector<Placement>;

// "Shard(0)", "Shard(0, interleave 4)", "Replicate()", "Partial(sum)"; "[Shard(0), Replicate()]".
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

}  // namespace lockstep
