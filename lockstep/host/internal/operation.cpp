#include "lockstep/host/internal/operation.h"

#include <algorithm>
#include <cstring>

#include "lockstep/host/internal/doorbell.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

constexpr std::uint32_t kSendReachable = 1, kRecvReachable = 2;

void ring_others(Fabric& fabric) {
  for (int r = 0; r < fabric.size(); ++r) {
    if (r != fabric.rank()) ring(fabric.control(r).doorbell);
  }
}

void copy(void* to, const void* from, std::uint64_t n_bytes) {
  if (to != from && n_bytes > 0) std::memcpy(to, from, n_bytes);
}

// A direct all-reduce is cut into one slice per rank and each slice into chunks, in elements. Chunks are small enough
// to be shared out evenly and to notice an abort, large enough that claiming one costs nothing.
struct Cut {
  std::uint64_t count, slice, chunk;
  Cut(std::uint64_t n, int size, std::uint64_t element) : count(n) {
    const std::uint64_t line = 64 / element * 4;
    const std::uint64_t even = (n + static_cast<std::uint64_t>(size) - 1) / static_cast<std::uint64_t>(size);
    slice = round_up(even, line);
    chunk = round_up(std::clamp<std::uint64_t>(slice / 8, (16 << 10) / element, (256 << 10) / element), line);
  }
  std::uint64_t begin(int rank) const { return std::min(count, slice * static_cast<std::uint64_t>(rank)); }
  std::uint64_t length(int rank) const { return std::min(count, begin(rank) + slice) - begin(rank); }
  std::uint64_t n_chunks(int rank) const { return (length(rank) + chunk - 1) / chunk; }
};

}  // namespace

Operation::Operation(const lockstep_op& op)
    : op_(op),
      element_(size_of(op.dtype)),
      n_bytes_(op.kind == LOCKSTEP_BARRIER ? 0 : op.count * element_),
      fingerprint_(internal::fingerprint(op.kind, op.dtype, op.reduce, op.root, op.count)) {}

std::uint64_t Operation::send_bytes(int size) const {
  return op_.kind == LOCKSTEP_REDUCE_SCATTER ? n_bytes_ * static_cast<std::uint64_t>(size) : n_bytes_;
}

std::uint64_t Operation::recv_bytes(int size) const {
  return op_.kind == LOCKSTEP_ALL_GATHER ? n_bytes_ * static_cast<std::uint64_t>(size) : n_bytes_;
}

void Operation::start(Fabric& fabric, std::uint64_t sequence) {
  sequence_ = sequence;
  stage_ = Stage::kArriving;
  const std::uint64_t sent = send_bytes(fabric.size());
  publish_call(fabric);
  Control& own = fabric.own();
  Arrival& arrival = own.arrivals[parity()];
  arrival.fingerprint = fingerprint_;
  if (in_place_) {
    own.claims[parity()].next.store(0, std::memory_order_relaxed);
    own.claims[parity()].done.store(0, std::memory_order_relaxed);
  } else if (can_be_inline(fabric.size()) && (op_.kind != LOCKSTEP_BROADCAST || fabric.rank() == op_.root)) {
    copy(const_cast<std::uint8_t*>(payload_of(fabric, fabric.rank())), op_.send, sent);
  }
  arrival.sequence.store(sequence << 1 | (in_place_ ? 1u : 0u), std::memory_order_seq_cst);
  ring_others(fabric);
}

// Writes the record the others read when they need the buffers, or words for a message.
void Operation::publish_call(Fabric& fabric) {
  Call& call = fabric.own().history[sequence_ % kHistory];
  call.sequence = sequence_;
  call.fingerprint = fingerprint_;
  const char* where = op_.where != nullptr ? op_.where : "";
  const std::size_t length = ::strnlen(where, sizeof(call.where) - 1);
  std::memcpy(call.where, where, length);
  call.where[length] = '\0';
  const std::uint64_t sent = send_bytes(fabric.size());
  if (sent <= kEagerBytes) return;
  const bool anywhere = fabric.single_process();
  const bool sends = anywhere || fabric.arena().contains(op_.send, sent);
  const bool receives = anywhere || fabric.arena().contains(op_.recv, recv_bytes(fabric.size()));
  const auto base = anywhere ? 0 : reinterpret_cast<std::uintptr_t>(fabric.base(fabric.rank()));
  call.reachable = (sends ? kSendReachable : 0) | (receives ? kRecvReachable : 0);
  call.send = reinterpret_cast<std::uintptr_t>(op_.send) - base;
  call.recv = reinterpret_cast<std::uintptr_t>(op_.recv) - base;
  in_place_ = op_.kind == LOCKSTEP_ALL_REDUCE && sends && receives;
  n_in_place_ = in_place_ ? 1 : 0;
}

Progress Operation::advance(Fabric& fabric, Workspace& work) {
  if (stage_ == Stage::kArriving) {
    if (const Progress p = arrive(fabric); p != Progress::kDone) return p;
    choose_path(fabric, work);
  }
  switch (stage_) {
    case Stage::kClaiming:
      return op_.kind == LOCKSTEP_ALL_REDUCE ? claim(fabric, work) : copy_direct(fabric, work);
    case Stage::kCounting:
      return count_done(fabric);
    case Stage::kPlanned:
    case Stage::kLeaving:
      return follow_plan(fabric, work);
    default:
      return Progress::kDone;
  }
}

Progress Operation::arrive(Fabric& fabric) {
  const int size = fabric.size();
  for (; peer_ < size; ++peer_) {
    if (peer_ == fabric.rank()) continue;
    Arrival& arrival = fabric.control(peer_).arrivals[parity()];
    const std::uint64_t entered = arrival.sequence.load(std::memory_order_acquire);
    if (entered >> 1 != sequence_) return Progress::kBlocked;
    if (arrival.fingerprint != fingerprint_) return Progress::kMismatch;
    n_in_place_ += static_cast<int>(entered & 1);
    ++mark_;
  }
  peer_ = 0;
  return Progress::kDone;
}

// All ranks have read the same words by now, so all come to the same answer.
void Operation::choose_path(Fabric& fabric, Workspace& work) {
  if (can_be_inline(fabric.size()) && n_in_place_ == 0) {
    finish_inline(fabric, work);
    stage_ = Stage::kDone;
  } else if (op_.kind == LOCKSTEP_ALL_REDUCE ? n_in_place_ == fabric.size() : direct_possible(fabric)) {
    stage_ = Stage::kClaiming;
  } else {
    plan_ = make_plan({.kind = op_.kind,
                       .rank = fabric.rank(),
                       .size = fabric.size(),
                       .root = op_.root,
                       .n_bytes = n_bytes_,
                       .stage_in_bytes = kStageInBytes,
                       .stage_out_bytes = kStageOutBytes});
    stage_ = Stage::kPlanned;
  }
}

bool Operation::direct_possible(Fabric& fabric) const {
  if (op_.kind == LOCKSTEP_BROADCAST) return (call_of(fabric, op_.root).reachable & kSendReachable) != 0;
  for (int r = 0; r < fabric.size(); ++r) {
    if ((call_of(fabric, r).reachable & kSendReachable) == 0) return false;
  }
  return true;
}

const std::uint8_t* Operation::payload_of(Fabric& fabric, int rank) const {
  if (send_bytes(fabric.size()) <= kTinyBytes) return fabric.control(rank).arrivals[parity()].payload;
  return fabric.base(rank) + kInlineAt + parity() * kInlineBytes;
}

void Operation::finish_inline(Fabric& fabric, Workspace& work) {
  const auto me = static_cast<std::uint64_t>(fabric.rank());
  switch (op_.kind) {
    case LOCKSTEP_BROADCAST:
      return copy(op_.recv, payload_of(fabric, op_.root), n_bytes_);
    case LOCKSTEP_ALL_GATHER:
      for (int r = 0; r < fabric.size(); ++r) {
        copy(static_cast<std::uint8_t*>(op_.recv) + static_cast<std::uint64_t>(r) * n_bytes_,
             payload_of(fabric, r), n_bytes_);
      }
      return;
    case LOCKSTEP_ALL_REDUCE:
    case LOCKSTEP_REDUCE_SCATTER: {
      if (n_bytes_ == 0) return;
      const std::uint64_t at = op_.kind == LOCKSTEP_REDUCE_SCATTER ? me * n_bytes_ : 0;
      for (int r = 0; r < fabric.size(); ++r)
        work.sources[static_cast<std::size_t>(r)] = payload_of(fabric, r) + at;
      void* const target = op_.recv;
      return reduce(op_.dtype, op_.reduce, work.sources, {&target, 1}, op_.count);
    }
    default:
      return;
  }
}

std::uint8_t* Operation::buffer(Fabric& fabric, int rank, std::uint64_t at, std::uint64_t n_bytes) const {
  if (fabric.single_process()) return reinterpret_cast<std::uint8_t*>(at);
  const std::uint64_t room = fabric.arena_size(rank);
  if (at < kHeapAt || at > room || n_bytes > room - at) return nullptr;
  return fabric.base(rank) + at;
}

// Own slice first, then whatever the others have not got to: a rank that is not running holds nobody up.
Progress Operation::claim(Fabric& fabric, Workspace& work) {
  const int size = fabric.size(), me = fabric.rank();
  const Cut cut(op_.count, size, element_);
  auto& send = work.send;
  auto& recv = work.recv;
  for (int r = 0; r < size; ++r) {
    send[static_cast<std::size_t>(r)] = buffer(fabric, r, call_of(fabric, r).send, n_bytes_);
    recv[static_cast<std::size_t>(r)] = buffer(fabric, r, call_of(fabric, r).recv, n_bytes_);
    peer_ = r;
    if (!send[static_cast<std::size_t>(r)] || !recv[static_cast<std::size_t>(r)]) return Progress::kBadPeer;
  }
  for (int turn = 0; turn < size; ++turn) {
    const int owner = (me + turn) % size;
    Claims& claims = fabric.control(owner).claims[parity()];
    const std::uint64_t n_chunks = cut.n_chunks(owner);
    for (;;) {
      if (claims.next.load(std::memory_order_relaxed) >= n_chunks) break;
      const std::uint64_t index = claims.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= n_chunks) break;
      if (fabric.own().broken.load(std::memory_order_relaxed) != 0) break;
      const std::uint64_t first = cut.begin(owner) + index * cut.chunk;
      const std::uint64_t count = std::min(cut.chunk, cut.begin(owner) + cut.length(owner) - first);
      for (int r = 0; r < size; ++r) {
        work.sources[static_cast<std::size_t>(r)] = send[static_cast<std::size_t>(r)] + first * element_;
        work.targets[static_cast<std::size_t>(r)] = recv[static_cast<std::size_t>(r)] + first * element_;
      }
      reduce(op_.dtype, op_.reduce, work.sources, work.targets, count);
      if (claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks) ring_others(fabric);
    }
  }
  ++mark_;
  stage_ = Stage::kCounting;
  peer_ = 0;
  return count_done(fabric);
}

Progress Operation::count_done(Fabric& fabric) {
  const Cut cut(op_.count, fabric.size(), element_);
  for (; peer_ < fabric.size(); ++peer_) {
    if (fabric.control(peer_).claims[parity()].done.load(std::memory_order_acquire) != cut.n_chunks(peer_)) {
      return Progress::kBlocked;
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

// The other direct collectives only read from the others; the buffers are theirs again when all have said so.
Progress Operation::copy_direct(Fabric& fabric, Workspace& work) {
  const int size = fabric.size();
  const auto me = static_cast<std::uint64_t>(fabric.rank());
  for (peer_ = 0; peer_ < size; ++peer_) {
    const auto r = static_cast<std::uint64_t>(peer_);
    if (op_.kind == LOCKSTEP_BROADCAST && peer_ != op_.root) continue;
    const std::uint8_t* from = buffer(fabric, peer_, call_of(fabric, peer_).send, send_bytes(size));
    if (from == nullptr) return Progress::kBadPeer;
    if (op_.kind == LOCKSTEP_REDUCE_SCATTER) work.sources[r] = from + me * n_bytes_;
    if (op_.kind == LOCKSTEP_ALL_GATHER)
      copy(static_cast<std::uint8_t*>(op_.recv) + r * n_bytes_, from, n_bytes_);
    if (op_.kind == LOCKSTEP_BROADCAST) copy(op_.recv, from, n_bytes_);
  }
  if (op_.kind == LOCKSTEP_REDUCE_SCATTER) {
    void* const target = op_.recv;
    reduce(op_.dtype, op_.reduce, work.sources, {&target, 1}, op_.count);
  }
  signal(fabric, 1);
  plan_.push_back({.kind = StepKind::kWait, .phase = 1});
  stage_ = Stage::kLeaving;
  peer_ = 0;
  return follow_plan(fabric, work);
}

Progress Operation::follow_plan(Fabric& fabric, Workspace& work) {
  for (; next_step_ < plan_.size(); ++next_step_, ++mark_) {
    const Step& step = plan_[next_step_];
    if (step.kind == StepKind::kWait) {
      if (!reached(fabric, step)) return Progress::kBlocked;
      peer_ = 0;
    } else {
      if (fabric.own().broken.load(std::memory_order_relaxed) != 0) return Progress::kBlocked;
      execute(step, fabric, work);
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

bool Operation::reached(Fabric& fabric, const Step& step) {
  const std::uint64_t target = sequence_ << kPhaseBits | step.phase;
  if (step.peer >= 0) peer_ = step.peer;
  for (; peer_ < fabric.size(); ++peer_) {
    if (peer_ == fabric.rank()) continue;
    if (fabric.control(peer_).step.load(std::memory_order_acquire) < target) return false;
    if (step.peer >= 0) break;
  }
  return true;
}

void Operation::signal(Fabric& fabric, std::uint32_t phase) {
  fabric.own().step.store(sequence_ << kPhaseBits | phase, std::memory_order_seq_cst);
  ring_others(fabric);
}

void Operation::execute(const Step& step, Fabric& fabric, Workspace& work) {
  const auto* send = static_cast<const std::uint8_t*>(op_.send);
  auto* recv = static_cast<std::uint8_t*>(op_.recv);
  const auto stage_in = [&](int r) {
    return fabric.base(r) + kStageInAt + step.parity * kStageInBytes + step.stage_at;
  };
  const auto stage_out = [&](int r) { return fabric.base(r) + kStageOutAt + step.parity * kStageOutBytes; };
  switch (step.kind) {
    case StepKind::kCopyIn:
      return copy(stage_in(fabric.rank()), send + step.user_at, step.n_bytes);
    case StepKind::kCopyOut:
      return copy(recv + step.recv_at,
                  step.from_in ? stage_in(step.peer) : stage_out(step.peer) + step.stage_at, step.n_bytes);
    case StepKind::kKeep:
      return copy(recv + step.recv_at, send + step.user_at, step.n_bytes);
    case StepKind::kReduce: {
      for (int r = 0; r < fabric.size(); ++r) {
        work.sources[static_cast<std::size_t>(r)] = r == fabric.rank() ? send + step.user_at : stage_in(r);
      }
      void* const targets[] = {recv + step.recv_at, stage_out(fabric.rank())};
      return reduce(op_.dtype, op_.reduce, work.sources, {targets, step.publish ? 2u : 1u},
                    step.n_bytes / element_);
    }
    case StepKind::kSignal:
      return signal(fabric, step.phase);
    case StepKind::kWait:
      return;
  }
}

}  // namespace lockstep::comm::internal
