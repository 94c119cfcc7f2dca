// Helpers for the C table of an engine written in C++: they copy text into buffers, report capabilities, keep
// exceptions inside, and validate calls before the engine executes them. Public, for authors of plug-ins: it
// includes engine_abi.h and the standard library only, and is compiled into the plug-in. An engine written in
// C does not need it (tests/plugins/kv_engine.c).
// Thread safety: functions without state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// ---- entries ----

// Copies as much as fits and terminates it with a zero byte. A null or empty buffer is left alone.
inline void put(char* to, std::size_t capacity, std::string_view text) noexcept {
  if (to == nullptr || capacity == 0) return;
  const std::size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

// The entry `capabilities`: the caller's struct may be older and shorter than `all`.
inline lockstep_status give_capabilities(const lockstep_capabilities& all,
                                         lockstep_capabilities* out) noexcept {
  const std::size_t n = std::min(out->struct_size, sizeof all);
  std::memcpy(out, &all, n);
  out->struct_size = n;
  return LOCKSTEP_OK;
}

// Every kind of operation and every type; reductions where can_reduce(dtype, op) says so. The rest is zero.
template <class CanReduce>
lockstep_capabilities all_kinds(const CanReduce& can_reduce) {
  lockstep_capabilities all{};
  all.struct_size = sizeof all;
  all.op_kinds = (1u << LOCKSTEP_OP_KINDS) - 1;
  all.dtypes = (1u << LOCKSTEP_DTYPES) - 1;
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
    for (int r = 0; r < LOCKSTEP_REDUCE_OPS; ++r) {
      if (can_reduce(static_cast<lockstep_dtype>(d), static_cast<lockstep_reduce_op>(r)))
        all.reduce[d] |= 1u << r;
    }
  }
  return all;
}

// Nothing may be thrown across the table. Runs `call`, which returns a status; when it throws, explain() is
// called while the exception is being handled, and returns the status that stands for it.
template <class Call, class Explain>
lockstep_status guarded(const Call& call, const Explain& explain) noexcept {
  try {
    return call();
  } catch (...) {
    return explain();
  }
}

// ---- operations ----

// Bytes of one element; 0 for an unknown type.
constexpr std::size_t size_of(lockstep_dtype dtype) {
  constexpr std::size_t kSizes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  static_assert(std::size(kSizes) == LOCKSTEP_DTYPES);
  return dtype >= 0 && dtype < LOCKSTEP_DTYPES ? kSizes[dtype] : 0;
}

constexpr bool has_root(lockstep_op_kind kind) {
  return kind == LOCKSTEP_BROADCAST || kind == LOCKSTEP_REDUCE || kind == LOCKSTEP_GATHER ||
         kind == LOCKSTEP_SCATTER;
}
constexpr bool has_reduce(lockstep_op_kind kind) {
  return kind == LOCKSTEP_ALL_REDUCE || kind == LOCKSTEP_REDUCE_SCATTER || kind == LOCKSTEP_REDUCE;
}
// Counts per peer instead of one.
constexpr bool is_uneven(lockstep_op_kind kind) {
  return kind == LOCKSTEP_ALL_TO_ALL_V || kind == LOCKSTEP_ALL_GATHER_V;
}
constexpr bool is_point_to_point(lockstep_op_kind kind) {
  return kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV;
}

// No mask at all: an engine of before there were devices.
constexpr bool takes_memory(const lockstep_capabilities& capabilities, lockstep_device_kind kind) {
  const std::uint32_t kinds =
      capabilities.device_kinds == 0 ? 1u << LOCKSTEP_HOST_MEMORY : capabilities.device_kinds;
  return kind >= 0 && kind < LOCKSTEP_DEVICE_KINDS && (kinds >> kind & 1u) != 0;
}

// More elements than this per rank and call are rejected, so that byte counts cannot overflow.
inline constexpr std::uint64_t kMaxElements = 1ull << 40;

namespace internal {

inline std::optional<std::uint64_t> sum_of(const std::uint64_t* counts, int n) {
  std::uint64_t sum = 0;
  for (int i = 0; i < n; ++i) {
    if (counts[i] >= kMaxElements || (sum += counts[i]) >= kMaxElements) return std::nullopt;
  }
  return sum;
}

inline const char* wrong_with_counts(const lockstep_op& op, int rank, int size) {
  const bool all_to_all = op.kind == LOCKSTEP_ALL_TO_ALL_V;
  if (op.recv_counts == nullptr || (all_to_all && op.send_counts == nullptr)) return "the counts are missing";
  const auto received = sum_of(op.recv_counts, size);
  const auto sent = all_to_all ? sum_of(op.send_counts, size) : op.recv_counts[rank];
  if (!received || !sent) return "too many elements";
  if (all_to_all && op.send_counts[rank] != op.recv_counts[rank])
    return "the rank sends itself another number of elements than it receives from itself";
  if ((*sent > 0 && op.send == nullptr) || (*received > 0 && op.recv == nullptr)) return "a buffer is null";
  return nullptr;
}

inline bool divides_all(std::uint64_t rows, const std::uint64_t* counts, int n) {
  return rows <= 1 || std::all_of(counts, counts + n, [&](std::uint64_t count) { return count % rows == 0; });
}

// Pre: the counts are there.
inline const char* wrong_with_rows(const lockstep_op& op, int size,
                                   const lockstep_capabilities& capabilities) {
  if (op.send_rows <= 1 && op.recv_rows <= 1) return nullptr;
  if (capabilities.takes_rows == 0) return "the engine does not take rows";
  if (op.send_rows > 1 && op.kind != LOCKSTEP_ALL_TO_ALL_V) return "the sent parts of this kind have no rows";
  const bool fits = op.kind == LOCKSTEP_ALL_GATHER
                        ? divides_all(op.recv_rows, &op.count, 1)
                        : is_uneven(op.kind) && divides_all(op.recv_rows, op.recv_counts, size);
  if (!fits || (op.send_rows > 1 && !divides_all(op.send_rows, op.send_counts, size)))
    return "a part is no multiple of the rows";
  return nullptr;
}

// A buffer that this rank's part of the operation reads or writes is missing.
inline bool lacks_buffer(const lockstep_op& op, int rank) {
  const bool sends = op.kind != LOCKSTEP_RECV && (op.kind != LOCKSTEP_SCATTER || rank == op.root);
  const bool at_root = op.kind == LOCKSTEP_REDUCE || op.kind == LOCKSTEP_GATHER;
  const bool receives = op.kind != LOCKSTEP_SEND && (!at_root || rank == op.root);
  return (sends && op.send == nullptr) || (receives && op.recv == nullptr);
}

}  // namespace internal

// What is wrong with the call on `rank` of `size`, as text, or null. A call that an engine with these
// capabilities does not offer is wrong too.
inline const char* wrong_with(const lockstep_op& op, int rank, int size,
                              const lockstep_capabilities& capabilities) {
  if (op.struct_size < sizeof(lockstep_op)) return "the operation's struct_size is too small";
  if (op.kind < 0 || op.kind >= LOCKSTEP_OP_KINDS) return "unknown operation";
  if ((capabilities.op_kinds >> op.kind & 1u) == 0) return "the engine does not offer this operation";
  if (!takes_memory(capabilities, op.device_kind)) return "the engine does not take memory of this device";
  if (op.kind == LOCKSTEP_BARRIER) return nullptr;
  if (op.dtype < 0 || op.dtype >= LOCKSTEP_DTYPES) return "unknown element type";
  if ((capabilities.dtypes >> op.dtype & 1u) == 0) return "the engine does not move this element type";
  if (is_uneven(op.kind)) {
    const char* const wrong = internal::wrong_with_counts(op, rank, size);
    return wrong != nullptr ? wrong : internal::wrong_with_rows(op, size, capabilities);
  }
  if (const char* const wrong = internal::wrong_with_rows(op, size, capabilities)) return wrong;
  if (op.count >= kMaxElements / static_cast<std::uint64_t>(size)) return "too many elements";
  if (has_reduce(op.kind)) {
    if (op.reduce < 0 || op.reduce >= LOCKSTEP_REDUCE_OPS) return "unknown reduction";
    if ((capabilities.reduce[op.dtype] >> op.reduce & 1u) == 0)
      return "this element type cannot be reduced with this operation";
  }
  if (is_point_to_point(op.kind)) {
    if (op.tag < 0) return "the tag is negative";
    if (op.root >= size || op.root < (op.kind == LOCKSTEP_RECV ? -1 : 0))
      return "the peer is not a rank of the group";
  }
  if (has_root(op.kind) && (op.root < 0 || op.root >= size)) return "the root is not a rank of the group";
  return op.count > 0 && internal::lacks_buffer(op, rank) ? "a buffer is null" : nullptr;
}

}  // namespace lockstep::comm
