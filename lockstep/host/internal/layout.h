// What lies in a rank's arena. Every rank maps every arena of its group; the owner writes its own block, others read
// it, except where said. All words that carry order are lock-free atomics; everything else is written before a
// release store and read after the matching acquire load.
//
// Operations are numbered from 1. Parts that exist twice are chosen by the number's lowest bit: a rank can be at most
// one operation ahead, since finishing one means having seen all others enter it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm::internal {

inline constexpr std::uint64_t kLayoutMagic = 0x6c6f636b73746570;  // "lockstep"
inline constexpr std::uint32_t kLayoutVersion = 1;

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kTinyBytes = 48;             // fits beside the flag
inline constexpr std::size_t kEagerBytes = 1 << 10;       // travels with the arrival wherever the buffer is
inline constexpr std::size_t kInlineBytes = 8 << 10;      // travels with the arrival
inline constexpr std::size_t kStageInBytes = 1 << 20;     // one parity of what a rank lays out for the others
inline constexpr std::size_t kStageOutBytes = 512 << 10;  // one parity of a rank's reduced slices
inline constexpr std::size_t kHistory = 32;
inline constexpr int kMaxRanks = 512;
inline constexpr std::uint64_t kMaxCount = 1ull << 40;

// Which numbers of a call matter.
constexpr bool has_root(lockstep_op_kind kind) {
  return kind == LOCKSTEP_BROADCAST || kind == LOCKSTEP_REDUCE || kind == LOCKSTEP_GATHER ||
         kind == LOCKSTEP_SCATTER;
}
constexpr bool has_reduce(lockstep_op_kind kind) {
  return kind == LOCKSTEP_ALL_REDUCE || kind == LOCKSTEP_REDUCE_SCATTER || kind == LOCKSTEP_REDUCE;
}

// An operation's numbers in one word, exact, so that comparing words compares calls.
constexpr std::uint64_t fingerprint(lockstep_op_kind kind, lockstep_dtype dtype, lockstep_reduce_op reduce,
                                    int root, std::uint64_t count) {
  return static_cast<std::uint64_t>(kind) << 60 | static_cast<std::uint64_t>(dtype) << 56 |
         static_cast<std::uint64_t>(reduce) << 52 | static_cast<std::uint64_t>(root) << 40 | count;
}
static_assert(LOCKSTEP_OP_KINDS <= 16 && LOCKSTEP_DTYPES <= 16 && LOCKSTEP_REDUCE_OPS <= 16);

// "I entered operation `sequence` with these numbers, and here is the payload if it is tiny": one cache line.
struct alignas(kLine) Arrival {
  // The number, shifted left by one; the lowest bit says "my buffers can be reduced in place, no payload here".
  std::atomic<std::uint64_t> sequence;
  std::uint64_t fingerprint;
  std::uint8_t payload[kTinyBytes];
};
static_assert(sizeof(Arrival) == kLine);

// One call, for buffers and for messages; the last kHistory of them stay readable after a failure.
struct alignas(kLine) Call {
  std::uint64_t sequence;
  std::uint64_t fingerprint;
  // Where the buffers are: offsets in the owner's arena when `reachable`, addresses when all ranks share a process.
  std::uint64_t send;
  std::uint64_t recv;
  std::uint32_t reachable;
  char where[92];  // caller's file:line, zero-terminated
};
static_assert(sizeof(Call) == 2 * kLine);

// Chunks of the owner's slice in a direct all-reduce: anyone claims one by adding to `next`, and adds to `done` when
// it is reduced. Reset by the owner before it arrives.
struct alignas(kLine) Claims {
  std::atomic<std::uint64_t> next;
  std::atomic<std::uint64_t> done;
};

// Where threads of this rank sleep. Others add to `bell` and wake it when `sleepers` is not zero.
struct alignas(kLine) Doorbell {
  std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
};

// The first failure of the group; only rank 0's is used. Claimed once by compare-exchange, then read-only.
struct Ledger {
  static constexpr std::uint32_t kEmpty = 0, kWriting = 1, kWritten = 2;
  std::atomic<std::uint32_t> state;
  std::int32_t status;     // lockstep_status
  std::int32_t peer_rank;  // to blame, or -1
  std::int32_t by_rank;    // who found out
  std::int64_t peer_pid;
  char message[768];
  char cause[128];
};

struct Control {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int64_t pid;
  Doorbell doorbell;
  // Set by anyone: stop, the ledger says why.
  alignas(kLine) std::atomic<std::uint32_t> broken;
  // Set by the owner when it leaves in order.
  std::atomic<std::uint32_t> left;
  // Set by the owner when it has mapped all others.
  std::atomic<std::uint32_t> joined;
  // sequence << 24 | phase: how far the owner is inside a staged or direct operation.
  alignas(kLine) std::atomic<std::uint64_t> step;
  Arrival arrivals[2];
  Claims claims[2];
  Call history[kHistory];
  Ledger ledger;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr int kPhaseBits = 24;

constexpr std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}
inline constexpr std::size_t kInlineAt = round_up(sizeof(Control), kPage);
inline constexpr std::size_t kStageInAt = kInlineAt + 2 * kInlineBytes;
inline constexpr std::size_t kStageOutAt = kStageInAt + 2 * kStageInBytes;
inline constexpr std::size_t kHeapAt = kStageOutAt + 2 * kStageOutBytes;
static_assert(kHeapAt % kPage == 0);

}  // namespace lockstep::comm::internal
