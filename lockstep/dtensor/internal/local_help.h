// What the local functions of rules share. Thread safety: as the mesh's groups.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {

// Where this rank's piece of a dimension begins. The pieces are not interleaved.
std::int64_t offset_of(const Layout& layout, const Sizes& sizes, std::int64_t dim);
bool shards(const Layout& layout, std::int64_t dim);
// The sum, maximum, ... over the ranks among which `layout` cuts `dim`; in place.
void reduce_over(const Layout& layout, std::int64_t dim, at::Tensor& value, ReduceOp::Kind op);

// Ends a local call with this result instead of the operator's.
void give(LocalCall& local, at::Tensor result);

}  // namespace lockstep::dtensor_internal
