#include "lockstep/host/internal/buffer_ref.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/push.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

// Moves all of it. The kernel may stop at a page that it cannot access; the next call then returns the error.
void read_process(std::int64_t pid, std::uint8_t* here, std::uint64_t there, std::uint64_t n_bytes) {
  while (n_bytes > 0) {
    const iovec local{here, n_bytes};
    const iovec remote{reinterpret_cast<void*>(there), n_bytes};
    const ssize_t moved = ::process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (moved <= 0) raise_copy_failure(pid, errno, "process_vm_readv");
    here += moved;
    there += static_cast<std::uint64_t>(moved);
    n_bytes -= static_cast<std::uint64_t>(moved);
  }
}

}  // namespace

// From cheap to expensive. Without a peer it must hold for all ranks: one rank in another process rules out
// the address, so that the published reach means the same to everybody.
Reach publish(CommMembers& members, const void* buffer, std::uint64_t n_bytes, std::uint64_t& at, int peer) {
  at = reinterpret_cast<std::uintptr_t>(buffer);
  if (peer >= 0 ? members.same_process(peer) : members.single_process()) return Reach::kByAddress;
  if (members.arena().contains(buffer, n_bytes)) {
    at = members.arena().offset_of(buffer);
    return Reach::kInArena;
  }
  return members.kernel_copies() ? Reach::kByKernel : Reach::kNowhere;
}

std::optional<BufferRef> find(CommMembers& members, int rank, Reach reach, std::uint64_t at,
                              std::uint64_t n_bytes) {
  switch (reach) {
    case Reach::kByAddress:
      if (!members.same_process(rank)) return std::nullopt;
      return BufferRef{.here = reinterpret_cast<std::uint8_t*>(at)};
    case Reach::kInArena:
      if (auto* here = members.in_arena(rank, at, n_bytes)) return BufferRef{.here = here};
      return std::nullopt;
    case Reach::kByKernel:
      if (!members.kernel_copies()) return std::nullopt;
      return BufferRef{.there = at, .pid = members.pid(rank), .rank = rank};
    case Reach::kNowhere:
      break;
  }
  return std::nullopt;
}

void raise_copy_failure(std::int64_t pid, int error, const char* call) {
  if (error == ESRCH) {
    base::raise(Failure{.kind = ErrorKind::kPeerLost,
                        .message = base::cat("process ", pid, " ended during a copy"),
                        .family = ErrorFamily::kBackend,
                        .peer = LostPeer{.pid = pid, .cause = "ended"}});
  }
  base::raise(base::system_failure(error, call, ErrorFamily::kBackend));
}

void copy(const BufferRef& to, const BufferRef& from, std::uint64_t n_bytes, std::uint64_t whole) {
  if (n_bytes == 0) return;
  before_touch();
  if (from.here == nullptr) return read_process(from.pid, to.here, from.there, n_bytes);
  if (to.here == from.here) return;
  if (whole >= kStreamFrom) return stream_copy(to.here, from.here, n_bytes);
  copy_bytes(to.here, from.here, n_bytes);
}

void take_back(CommMembers& members, int rank, const void* buffer, std::uint64_t n_bytes,
               const std::function<bool()>& inside, Deadline since) {
  const auto patience = std::chrono::nanoseconds(process_patience()).count();
  const auto until = members.same_process(rank)
                         ? Deadline::never()
                         : Deadline::from_monotonic_ns(since.monotonic_ns() + patience);
  // Usually the other rank is at most one chunk away from noticing. Polled, since its flag has no doorbell:
  // this is the failure path.
  while (inside() && !until.expired()) ::usleep(20);
  if (n_bytes == 0 || !inside()) return;
  // Not contains(): a part that was severed with a neighbour's buffer does not make the rest unreachable.
  if (!members.arena().in_heap(buffer, n_bytes)) return call_back(members, rank, inside);
  try {
    // Memory in the arena is mapped by the stopped process: no permission word can stop its stores, only
    // other pages can.
    members.arena().sever(buffer, n_bytes);
  } catch (...) {
    base::log(LogLevel::kError, base::cat("cannot take a buffer from rank ", rank,
                                          ", which is stopped: ", base::current_failure().message));
    while (inside()) ::usleep(1000);
  }
}

bool kernel_copies_work(const Peer& peer, int rank) {
  // A pid that the peer itself reported may be another process in this namespace.
  if (!peer.vouched) return false;
  Identity found{};
  const iovec local{&found, sizeof(found)};
  const iovec remote{reinterpret_cast<void*>(peer.header->identity_at), sizeof(found)};
  const ssize_t n = ::process_vm_readv(static_cast<pid_t>(peer.pid), &local, 1, &remote, 1, 0);
  return n == static_cast<ssize_t>(sizeof(found)) && found.magic == kLayoutMagic && found.rank == rank &&
         std::memcmp(found.nonce, peer.header->nonce, sizeof(found.nonce)) == 0;
}

}  // namespace lockstep::comm::internal
