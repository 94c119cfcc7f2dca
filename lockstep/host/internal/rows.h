// A part of a buffer that consists of equal runs, a pitch apart: a column of a matrix, or all in one run.
// What lockstep_op.send_rows and recv_rows describe. Thread safety: functions without state.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/host/internal/buffer_ref.h"

namespace lockstep::comm::internal {

struct Runs {
  BufferRef first;
  std::uint64_t run = 0;    // contiguous bytes
  std::uint64_t pitch = 0;  // bytes from one run to the next

  // Of a buffer of `rows` rows and `whole` bytes, the part of `n_bytes` that is preceded by parts of `before`
  // bytes.
  static Runs part_of(const BufferRef& buffer, std::uint64_t rows, std::uint64_t whole, std::uint64_t before,
                      std::uint64_t n_bytes) {
    if (rows <= 1) return {buffer + before, n_bytes, n_bytes};
    return {buffer + before / rows, n_bytes / rows, whole / rows};
  }
};

// Copies `n_bytes`, from the beginning of both. `whole` as in copy(). `scratch` holds what comes through the
// kernel on its way into several runs. False when `broken` was set meanwhile, and only some bytes were
// copied. Pre: `to` is here; a `from` that is not here is one run.
bool copy_runs(const Runs& to, const Runs& from, std::uint64_t n_bytes, std::uint64_t whole,
               const std::atomic<std::uint32_t>& broken, std::vector<std::uint8_t>& scratch);

// A buffer of rows as its parts one after the other, and back. `parts`: bytes of each. Null or false when
// `broken` was set, or `until` passed, before all was copied; looked at about once per MiB.
std::unique_ptr<std::uint8_t[]> pack_rows(const void* buffer, std::uint64_t rows,
                                          std::span<const std::uint64_t> parts,
                                          const std::atomic<std::uint32_t>& broken, Deadline until);
bool unpack_rows(void* buffer, std::uint64_t rows, std::span<const std::uint64_t> parts,
                 const std::uint8_t* packed, const std::atomic<std::uint32_t>& broken);

}  // namespace lockstep::comm::internal
