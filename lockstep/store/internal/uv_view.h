// Bytes and handles as libuv wants them, and its errors as ours.
#pragma once

#include <uv.h>

#include <cstdint>
#include <span>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {

// Not by uv_buf_init: it takes the length as 32 bits.
inline uv_buf_t uv_view(std::span<std::uint8_t> bytes) {
  uv_buf_t view{};
  view.base = reinterpret_cast<char*>(bytes.data());
  view.len = bytes.size();
  return view;
}

// Every handle begins as a uv_handle_t.
template <class T>
uv_handle_t* as_handle(T* handle) {
  return reinterpret_cast<uv_handle_t*>(handle);
}

// Raises kSystem for a libuv call of the store's server that failed.
inline void check_uv(int result, const char* what) {
  if (result == 0) return;
  base::raise(ErrorKind::kSystem, base::cat("store server: ", what, ": ", uv_strerror(result)),
              ErrorFamily::kNetwork);
}

}  // namespace lockstep::internal
