// What a call must be like before an engine looks at it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// Bytes of one element; 0 for an unknown type.
std::size_t size_of(lockstep_dtype dtype);

// More elements than this per rank and call are refused.
inline constexpr std::uint64_t kMaxElements = 1ull << 40;

// What is wrong with the call on `rank` of `size`, in words, or null. A call that an engine with these capabilities does
// not offer is wrong too.
const char* wrong_with(const lockstep_op& op, int rank, int size, const lockstep_capabilities& capabilities);

}  // namespace lockstep::comm
