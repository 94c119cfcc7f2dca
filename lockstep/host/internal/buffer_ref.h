// A buffer of some rank and how this rank accesses it: mapped here (in an arena, or in this process), or only
// through the kernel, which copies between processes that may trace each other (process_vm_readv,
// process_vm_writev).
//
// A process can be stopped at any instruction and continue an hour later, when the others have given it up
// and reuse their buffers. A late reader does no harm: it finds the group broken and discards what it read. A
// late writer would damage memory that is not its own: its writes through the kernel are revoked (push.h),
// and memory in an arena is taken from it when it does not finish in time (Arena::sever).
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/host/internal/layout.h"

namespace lockstep::comm::internal {

struct BufferRef {
  std::uint8_t* here = nullptr;  // null: not mapped in this process
  std::uint64_t there = 0;       // address in the owner's process
  std::int64_t pid = -1;         // the owner's
  int rank = -1;                 // the owner, when it is not mapped here

  BufferRef operator+(std::uint64_t n_bytes) const {
    return {here == nullptr ? nullptr : here + n_bytes, there + n_bytes, pid, rank};
  }
};

// How the others can access [buffer, buffer + n_bytes) of this rank; `at` receives the offset or address.
// With a `peer`, how that one can.
Reach publish(CommMembers& members, const void* buffer, std::uint64_t n_bytes, std::uint64_t& at,
              int peer = -1);
// A buffer as its owner published it; nothing when that cannot be true. Shared memory is input: offsets are
// checked here.
std::optional<BufferRef> find(CommMembers& members, int rank, Reach reach, std::uint64_t at,
                              std::uint64_t n_bytes);
inline BufferRef own_buffer(const void* buffer) {
  return {.here = const_cast<std::uint8_t*>(static_cast<const std::uint8_t*>(buffer))};
}

inline void copy_bytes(void* to, const void* from, std::uint64_t n_bytes) {
  if (to != from && n_bytes > 0) std::memcpy(to, from, n_bytes);
}

// Smaller results are likely to be read from the cache soon.
inline constexpr std::uint64_t kStreamFrom = 8 << 20;

// Pre: `to` is here. Raises kPeerLost when the owner of `from` is gone, kSystem when the kernel refuses.
// `whole`: the bytes that this copy is a piece of; from kStreamFrom on mapped memory is written past the
// caches.
void copy(const BufferRef& to, const BufferRef& from, std::uint64_t n_bytes, std::uint64_t whole = 0);
// What a copy by the kernel failed with.
[[noreturn]] void raise_copy_failure(std::int64_t pid, int error, const char* call);

// For a rank that failed and needs its buffer: returns when `rank`, which may write there, has finished
// (`inside` is false), or can no longer access it. A thread of this process is waited for without a limit;
// another process may be stopped for ever, so after process_patience() the memory is taken from it.
void take_back(CommMembers& members, int rank, const void* buffer, std::uint64_t n_bytes,
               const std::function<bool()>& inside, Deadline since);

// Whether the kernel lets this process copy from and to the peer's, and the pid that it reports is that of
// the arena's owner: the copy must find rank and nonce in the peer's private memory.
bool kernel_copies_work(const Peer& peer, int rank);

}  // namespace lockstep::comm::internal
