// Encoding of a tensor in the object format (docs/wire.md), shared by its codec, which needs libtorch, and
// Decoder::skip, which skips a tensor without it. Both must handle every flag that adds bytes. Thread safety:
// constants only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::object {

// The fixed part: dtype, device type, device index, flags.
inline constexpr std::size_t kTensorHeadBytes = 4;

inline constexpr std::uint8_t kRequiresGrad = 1;
// n_sparse and nnz follow the sizes, then two blobs instead of one.
inline constexpr std::uint8_t kSparse = 2;
inline constexpr std::uint8_t kCoalesced = 4;  // with kSparse
// Without kSparse: dense, not in row-major order; order[n] follows the sizes.
inline constexpr std::uint8_t kPermuted = 8;
inline constexpr std::uint8_t kAllTensorFlags = 15;

}  // namespace lockstep::object
