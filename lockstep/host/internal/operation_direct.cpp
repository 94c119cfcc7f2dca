// The direct paths of a collective: buffers are read and written in place, mapped here or through the kernel.
//
// All accesses happen while an Operation::Inside exists. A rank that finds `broken` in the middle stops at
// the next chunk and returns kBlocked; the driver then ends the operation. The checks inside loops are
// relaxed: they only bound how long that takes.
#include <algorithm>

#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/operation.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/push.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

// A reduction is cut into one slice per rank and each slice into chunks, in elements. Chunks are small enough
// to be distributed evenly and to notice an abort soon, large enough that claiming one costs little, or,
// through the kernel, that system calls do.
struct Cut {
  std::uint64_t count, slice, chunk;
  Cut(std::uint64_t n, int size, std::uint64_t element, bool by_kernel) : count(n) {
    const auto ranks = static_cast<std::uint64_t>(size);
    const std::uint64_t line = 64 / element * 4;
    slice = round_up((n + ranks - 1) / ranks, line);
    const std::uint64_t least = by_kernel ? 64 << 10 : 16 << 10, most = 256 << 10;
    chunk = round_up(std::clamp<std::uint64_t>(slice / 8, least / element, most / element), line);
  }
  std::uint64_t begin(int rank) const { return std::min(count, slice * static_cast<std::uint64_t>(rank)); }
  std::uint64_t length(int rank) const { return std::min(count, begin(rank) + slice) - begin(rank); }
  std::uint64_t n_chunks(int rank) const { return (length(rank) + chunk - 1) / chunk; }
};

// Bytes that one rank reduces alone between two checks for an abort.
constexpr std::uint64_t kPullChunk = 1 << 20;

// More than any buffer has: the sum of what 256 peers publish does not overflow.
constexpr std::uint64_t kMaxBytes = kMaxElements * 8;

// Between the root and one other rank.
constexpr std::uint64_t kMoveChunk = 256 << 10;

std::uint64_t n_move_chunks(std::uint64_t n_bytes) {
  return (n_bytes + kMoveChunk - 1) / kMoveChunk;
}

}  // namespace

bool Operation::find_buffers(CommMembers& members, Workspace& work) {
  const bool to_all = op_.kind == LOCKSTEP_ALL_REDUCE;
  work.recv.resize(to_all ? static_cast<std::size_t>(members.size()) : 1);
  by_kernel_ = false;
  for (int r = 0; r < members.size(); ++r) {
    peer_ = r;
    const PublishedCall& call = call_of(members, r);
    const auto send = r == members.rank()
                          ? own_buffer(op_.send)
                          : find(members, r, call.send_reach, call.send, send_bytes(members.size()));
    if (!send) return false;
    work.send[static_cast<std::size_t>(r)] = *send;
    by_kernel_ = by_kernel_ || send->here == nullptr;
    if (!reduces_whole() || (!to_all && r != op_.root)) continue;
    const auto recv =
        r == members.rank() ? own_buffer(op_.recv) : find(members, r, call.recv_reach, call.recv, n_bytes_);
    if (!recv) return false;
    work.recv[to_all ? static_cast<std::size_t>(r) : 0] = *recv;
    by_kernel_ = by_kernel_ || recv->here == nullptr;
  }
  return true;
}

// Reduces [first, first + count) of all ranks' inputs, `skip` bytes in, into every target. Inputs that are
// not mapped are first copied into scratch memory, which stays in this core's cache; targets that are not
// mapped are written from one that is. Sources are in rank order whoever runs this: the result has the same
// bits wherever the chunk was claimed.
bool Operation::reduce_range(CommMembers& members, Workspace& work, std::uint64_t first, std::uint64_t count,
                             std::uint64_t skip) {
  const std::uint64_t at = first * element_, n_bytes = count * element_;
  const auto n_sources = static_cast<std::size_t>(members.size());
  if (by_kernel_ && work.scratch.size() < (n_sources + 1) * n_bytes)
    work.scratch.resize((n_sources + 1) * n_bytes);
  for (std::size_t r = 0; r < n_sources; ++r) {
    const BufferRef from = work.send[r] + (at + skip);
    if (from.here == nullptr) copy(own_buffer(work.scratch.data() + r * n_bytes), from, n_bytes);
    work.sources[r] = from.here != nullptr ? from.here : work.scratch.data() + r * n_bytes;
  }
  std::size_t n_here = 0;
  for (const BufferRef& target : work.recv) {
    if (target.here != nullptr) work.targets[n_here++] = target.here + at;
  }
  // No target is mapped here: reduce into scratch.
  if (n_here == 0) work.targets[n_here++] = work.scratch.data() + n_sources * n_bytes;
  before_touch();
  reduce(op_.dtype, op_.reduce, work.sources, {work.targets.data(), n_here}, count);
  const Permission permission{members.own().broken};
  return std::ranges::all_of(work.recv, [&](const BufferRef& target) {
    return target.here != nullptr || put(members, target + at, work.targets[0], n_bytes, 0, permission);
  });
}

// A small reduction: every rank reduces its own slice and signals when it is done; claiming chunks would cost
// more.
Progress Operation::reduce_own(CommMembers& members, Workspace& work) {
  if (!find_buffers(members, work)) return Progress::kBadPeer;
  const Cut cut(op_.count, members.size(), element_, false);
  const int me = members.rank();
  if (cut.length(me) > 0 && !reduce_range(members, work, cut.begin(me), cut.length(me), 0))
    return Progress::kBlocked;
  return leave_together(members, work);
}

// Own slice first, then what the others have not claimed: a rank that is descheduled does not delay the
// others.
Progress Operation::claim(CommMembers& members, Workspace& work) {
  if (!find_buffers(members, work)) return Progress::kBadPeer;
  const int size = members.size(), me = members.rank();
  const Cut cut(op_.count, size, element_, members.kernel_copies());
  for (int turn = 0; turn < size; ++turn) {
    const int owner = (me + turn) % size;
    Claims& claims = members.block(owner).claims[parity()];
    const std::uint64_t n_chunks = cut.n_chunks(owner);
    // The load spares a finished slice the write to its cache line. relaxed: the addition hands out each
    // index once, and the inputs are visible since their owners' arrivals were acquired.
    while (claims.next.load(std::memory_order_relaxed) < n_chunks) {
      const std::uint64_t index = claims.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= n_chunks || members.own().broken.load(std::memory_order_relaxed) != 0) break;
      const std::uint64_t first = cut.begin(owner) + index * cut.chunk;
      const std::uint64_t count = std::min(cut.chunk, cut.begin(owner) + cut.length(owner) - first);
      if (!reduce_range(members, work, first, count, 0)) return Progress::kBlocked;
      perturb();
      // Releases the chunk's result to who counts it in count_done(); seq_cst: before the check for sleepers.
      if (claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks) members.ring_others();
    }
  }
  ++mark_;
  stage_ = Stage::kCounting;
  peer_ = 0;
  return count_done(members);
}

// Once every chunk of every slice is done, every input has been read and every result written: the buffers
// are the callers' again, without a second barrier. While one is missing, peer_ is the owner of its slice,
// which is not necessarily the rank that claimed the chunk.
Progress Operation::count_done(CommMembers& members) {
  const Cut cut(op_.count, members.size(), element_, members.kernel_copies());
  for (; peer_ < members.size(); ++peer_) {
    if (members.block(peer_).claims[parity()].done.load(std::memory_order_acquire) != cut.n_chunks(peer_)) {
      return Progress::kBlocked;
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

// Kinds in which every rank only reads from the others; the buffers are their owners' again when all ranks
// have signalled.
Progress Operation::copy_direct(CommMembers& members, Workspace& work) {
  if (op_.kind == LOCKSTEP_REDUCE_SCATTER) {
    if (!find_buffers(members, work)) return Progress::kBadPeer;
    work.recv.assign(1, own_buffer(op_.recv));
    const std::uint64_t skip = static_cast<std::uint64_t>(members.rank()) * n_bytes_;
    const std::uint64_t step = (by_kernel_ ? 128 << 10 : kPullChunk) / element_;
    for (std::uint64_t first = 0; first < op_.count; first += step) {
      if (members.own().broken.load(std::memory_order_relaxed) != 0) return Progress::kBlocked;
      reduce_range(members, work, first, std::min(step, op_.count - first), skip);
    }
  } else if (const Progress pulled = pull_all(members, work); pulled != Progress::kDone) {
    return pulled;
  }
  return leave_together(members, work);
}

// A barrier: nobody leaves while another rank may still read its buffers, or write into them (reduce_own).
Progress Operation::leave_together(CommMembers& members, Workspace& work) {
  signal(members, 1);
  plan_.push_back({.kind = StepKind::kWait, .phase = 1});
  stage_ = Stage::kLeaving;
  peer_ = 0;
  return follow_plan(members, work);
}

// Shared memory is input: a peer's numbers are checked before they are used.
std::optional<Runs> Operation::find_part(CommMembers& members, std::uint64_t n_bytes) {
  const int me = members.rank();
  std::uint64_t at = 0, run = n_bytes, pitch = n_bytes;
  if (is_uneven(op_.kind)) {
    const Counts* counts = counts_of(members, peer_);
    at = counts[me].at;
    run = counts[me].run;
    if (run == 0 || run > n_bytes || n_bytes % run != 0) return std::nullopt;
    pitch = 0;
    for (int r = 0; r < members.size(); ++r) pitch += std::min(counts[r].run, kMaxBytes);
  }
  if (op_.kind == LOCKSTEP_ALL_TO_ALL) at = static_cast<std::uint64_t>(me) * n_bytes_;
  if (peer_ == me) return Runs{own_buffer(send_ + at), run, pitch};
  const PublishedCall& call = call_of(members, peer_);
  std::uint64_t extent = 0;
  if (__builtin_mul_overflow(n_bytes / run - 1, pitch, &extent) ||
      __builtin_add_overflow(extent, run, &extent)) {
    return std::nullopt;
  }
  const auto first = find(members, peer_, call.send_reach, call.send + at, extent);
  if (!first || (first->here == nullptr && run != n_bytes)) return std::nullopt;
  return Runs{*first, run, pitch};
}

Progress Operation::pull_all(CommMembers& members, Workspace& work) {
  const int size = members.size(), me = members.rank();
  const Traffic traffic = traffic_of(plan_input(members));
  std::uint64_t whole = 0;
  for (const Traffic::Part& part : traffic.receives) whole += part.n_bytes;
  for (int turn = 0; turn < size; ++turn) {
    peer_ = (me + turn) % size;  // so that not all read from the same rank at once
    const Traffic::Part& part = traffic.receives[static_cast<std::size_t>(peer_)];
    if (part.n_bytes == 0) continue;
    const auto from = find_part(members, part.n_bytes);
    if (!from) return Progress::kBadPeer;
    const auto to = Runs::part_of(own_buffer(recv_), op_.recv_rows, whole, part.at, part.n_bytes);
    if (!copy_runs(to, *from, part.n_bytes, whole, members.own().broken, work.scratch))
      return Progress::kBlocked;
  }
  return Progress::kDone;
}

// Broadcast, scatter and gather: bytes move between the root and each other rank. Both ends of a pair claim
// chunks of it, as far as each can access the other's buffer; the claims are those of the rank that is not
// the root.
bool Operation::move_pair(CommMembers& members, int other) {
  const int me = members.rank(), root = op_.root, peer = me == root ? other : root;
  const bool i_receive = (me == root) == (op_.kind == LOCKSTEP_GATHER);
  const std::uint64_t root_at =
      op_.kind == LOCKSTEP_BROADCAST ? 0 : static_cast<std::uint64_t>(other) * n_bytes_;
  const std::uint64_t my_at = me == root ? root_at : 0, peer_at = me == root ? 0 : root_at;
  const PublishedCall& call = call_of(members, peer);
  const Reach reach = i_receive ? call.send_reach : call.recv_reach;
  if (reach == Reach::kNowhere) return true;
  peer_ = peer;
  const auto theirs = find(members, peer, reach, (i_receive ? call.send : call.recv) + peer_at, n_bytes_);
  if (!theirs) return false;
  const BufferRef mine = own_buffer(i_receive ? op_.recv : op_.send) + my_at;
  const Permission permission{members.own().broken};
  Claims& claims = members.block(other).claims[parity()];
  const std::uint64_t n_chunks = n_move_chunks(n_bytes_);
  while (claims.next.load(std::memory_order_relaxed) < n_chunks) {
    const std::uint64_t index = claims.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= n_chunks || members.own().broken.load(std::memory_order_relaxed) != 0) break;
    const std::uint64_t at = index * kMoveChunk, n_bytes = std::min(kMoveChunk, n_bytes_ - at);
    if (i_receive) copy(mine + at, *theirs + at, n_bytes, n_bytes_);
    if (!i_receive && !put(members, *theirs + at, (mine + at).here, n_bytes, n_bytes_, permission)) break;
    perturb();
    if (claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks) members.ring(peer);
  }
  return true;
}

Progress Operation::move_rooted(CommMembers& members) {
  const int me = members.rank(), size = members.size();
  if (me != op_.root && !move_pair(members, me)) return Progress::kBadPeer;
  if (me == op_.root) {
    for (int turn = 1; turn < size; ++turn) {
      if (!move_pair(members, (me + turn) % size)) return Progress::kBadPeer;
    }
    const std::uint64_t own_at = static_cast<std::uint64_t>(me) * n_bytes_;
    const BufferRef send = own_buffer(op_.send), recv = own_buffer(op_.recv);
    copy(op_.kind == LOCKSTEP_GATHER ? recv + own_at : recv,
         op_.kind == LOCKSTEP_SCATTER ? send + own_at : send, n_bytes_, n_bytes_);
  }
  ++mark_;
  stage_ = Stage::kCounting;
  peer_ = 0;
  return count_moved(members);
}

// A rank is done when its own pair is, the root when all pairs are.
Progress Operation::count_moved(CommMembers& members) {
  const auto moved = [&](int r) {
    return members.block(r).claims[parity()].done.load(std::memory_order_acquire) == n_move_chunks(n_bytes_);
  };
  if (members.rank() != op_.root) {
    peer_ = op_.root;
    if (!moved(members.rank())) return Progress::kBlocked;
  } else {
    for (; peer_ < members.size(); ++peer_) {
      if (peer_ != op_.root && !moved(peer_)) return Progress::kBlocked;
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

}  // namespace lockstep::comm::internal
