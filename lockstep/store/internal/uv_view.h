// Bytes as libuv wants them. Not by uv_buf_init: it takes the length as 32 bits.
#pragma once

#include <uv.h>

#include <cstdint>
#include <span>

namespace lockstep::internal {

inline uv_buf_t uv_view(std::span<std::uint8_t> bytes) {
  uv_buf_t view{};
  view.base = reinterpret_cast<char*>(bytes.data());
  view.len = bytes.size();
  return view;
}

}  // namespace lockstep::internal
