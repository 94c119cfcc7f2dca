// The arithmetic of the fake NCCL: one element type at a time, in double or in whole numbers.
#pragma once

#include <cstddef>
#include <vector>

#include "engines/nccl/nccl_api.h"

namespace lockstep::fake_nccl {

std::size_t size_of(nccl_plugin::DataType type);
// to[i] = reduction over r of from[r][i].
void reduce(nccl_plugin::DataType type, nccl_plugin::RedOp op, const std::vector<const void*>& from, void* to,
            std::size_t count);

}  // namespace lockstep::fake_nccl
