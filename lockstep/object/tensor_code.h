// How a tensor is written in the object format (docs/wire.md): what its codec, which needs libtorch, and Decoder::skip, which
// steps over one without it, must both know. Each flag that adds bytes is a case in both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::object {

// The fixed part: dtype, device type, device index, flags.
inline constexpr std::size_t kTensorHeadBytes = 4;

inline constexpr std::uint8_t kRequiresGrad = 1;
inline constexpr std::uint8_t kSparse =
    2;  // n_sparse and nnz follow the sizes, then two blobs instead of one
inline constexpr std::uint8_t kCoalesced = 4;  // with kSparse
inline constexpr std::uint8_t kPermuted =
    8;  // without kSparse: dense, not in row-major order; order[n] follows the sizes
inline constexpr std::uint8_t kAllTensorFlags = 15;

}  // namespace lockstep::object
