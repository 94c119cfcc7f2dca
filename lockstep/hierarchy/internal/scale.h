// Multiplies by a number: what is left to do for a mean when hosts have different numbers of ranks.
#pragma once

#include <cstdint>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm::hierarchy {

// Halves are computed in f32 and rounded to nearest even. Pre: a floating type.
void scale(lockstep_dtype dtype, void* data, std::uint64_t count, double factor);

}  // namespace lockstep::comm::hierarchy
