#include "lockstep/host/internal/operation.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/base/base.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

// What a plan makes a rank look at was laid out before the phase it waited for.
Stage& stage_of(Circle& circle, int rank) {
  if (rank == circle.rank()) return circle.own_stage();
  Stage* stage = circle.stage(rank);
  if (stage == nullptr)
    raise(ErrorKind::kInternal, cat("rank ", rank, " has no staging area"), ErrorFamily::kBackend);
  return *stage;
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
      n_bytes_(op.count * element_),
      fingerprint_(internal::fingerprint(op.kind, op.dtype, op.reduce, op.root, op.count)) {}

void Operation::take_counts(int rank, int size) {
  const auto copy_counts = [&](const std::uint64_t* counts, std::vector<std::uint64_t>& to) {
    to.resize(static_cast<std::size_t>(size));
    for (std::size_t r = 0; r < to.size(); ++r) to[r] = counts[r] * element_;
  };
  copy_counts(op_.recv_counts, uneven_receives_);
  if (op_.kind == LOCKSTEP_ALL_TO_ALL_V) {
    copy_counts(op_.send_counts, uneven_sends_);
    uneven_sent_ = std::accumulate(uneven_sends_.begin(), uneven_sends_.end(), std::uint64_t{0});
  } else {
    uneven_sent_ = uneven_receives_[static_cast<std::size_t>(rank)];
  }
}

// What the others may read of this rank's buffer. Alike on all ranks but for the kinds with counts of their own.
std::uint64_t Operation::send_bytes(int size) const {
  switch (op_.kind) {
    case LOCKSTEP_REDUCE_SCATTER:
    case LOCKSTEP_SCATTER:
    case LOCKSTEP_ALL_TO_ALL:
      return n_bytes_ * static_cast<std::uint64_t>(size);
    case LOCKSTEP_ALL_TO_ALL_V:
    case LOCKSTEP_ALL_GATHER_V:
      return uneven_sent_;
    default:
      return n_bytes_;
  }
}

void Operation::start(Circle& circle, std::uint64_t sequence) {
  sequence_ = sequence;
  stage_ = Stage::kArriving;
  const std::uint64_t sent = send_bytes(circle.size());
  publish_call(circle);
  Board& own = circle.own();
  Arrival& arrival = own.arrivals[parity()];
  arrival.fingerprint = fingerprint_;
  if (in_place_) {
    own.claims[parity()].next.store(0, std::memory_order_relaxed);
    own.claims[parity()].done.store(0, std::memory_order_relaxed);
  } else if (is_uneven(op_.kind)) {
    publish_counts(circle);
  } else if (can_be_inline(circle.size()) && sends(circle.rank())) {
    copy(const_cast<std::uint8_t*>(payload_of(circle, circle.rank())), op_.send, sent);
  }
  perturb();
  arrival.sequence.store(sequence << 1 | (in_place_ ? 1u : 0u), std::memory_order_seq_cst);
  circle.ring_others();
}

// Only the root has something to send in these two.
bool Operation::sends(int rank) const {
  return (op_.kind != LOCKSTEP_BROADCAST && op_.kind != LOCKSTEP_SCATTER) || rank == op_.root;
}

void Operation::publish_counts(Circle& circle) {
  auto* table = const_cast<Counts*>(counts_of(circle, circle.rank()));
  const Traffic traffic = traffic_of(plan_input(circle));
  for (std::size_t r = 0; r < traffic.sends.size(); ++r) {
    table[r] = {traffic.sends[r].at, traffic.sends[r].n_bytes, traffic.receives[r].n_bytes};
  }
}

const Counts* Operation::counts_of(Circle& circle, int rank) const {
  return reinterpret_cast<const Counts*>(circle.board(rank).payload[parity()]);
}

// Every rank looks at every pair, so all come to the same answer and nobody begins to move what another gave up.
bool Operation::counts_agree(Circle& circle) {
  for (int from = 0; from < circle.size(); ++from) {
    for (int to = 0; to < circle.size(); ++to) {
      peer_ = from;
      uneven_receiver_ = to;
      if (counts_of(circle, from)[to].sends != counts_of(circle, to)[from].expects) return false;
    }
  }
  return true;
}

PlanInput Operation::plan_input(Circle& circle) const {
  return {.kind = op_.kind,
          .rank = circle.rank(),
          .size = circle.size(),
          .root = op_.root,
          .n_bytes = n_bytes_,
          .stage_in_bytes = kStageInBytes,
          .stage_out_bytes = kStageOutBytes,
          .send_bytes = uneven_sends_,
          .recv_bytes = uneven_receives_};
}

// Writes the record the others read when they need the buffers, or words for a message.
void Operation::publish_call(Circle& circle) {
  Call& call = circle.own().history[sequence_ % kHistory];
  call.sequence = sequence_;
  call.fingerprint = fingerprint_;
  const char* where = op_.where != nullptr ? op_.where : "";
  const std::size_t length = ::strnlen(where, sizeof(call.where) - 1);
  std::memcpy(call.where, where, length);
  call.where[length] = '\0';
  const std::uint64_t sent = send_bytes(circle.size());
  if (sent <= kEagerBytes && !is_uneven(op_.kind)) return;
  const bool anywhere = circle.single_process();
  const bool sendable =
      anywhere || sent == 0 || !sends(circle.rank()) || circle.arena().contains(op_.send, sent);
  const bool receivable = anywhere || (op_.kind == LOCKSTEP_REDUCE && circle.rank() != op_.root) ||
                          circle.arena().contains(op_.recv, n_bytes_);
  const auto base = anywhere ? 0 : reinterpret_cast<std::uintptr_t>(circle.arena().base());
  call.reachable = sendable ? 1 : 0;
  call.send = reinterpret_cast<std::uintptr_t>(op_.send) - base;
  call.recv = reinterpret_cast<std::uintptr_t>(op_.recv) - base;
  in_place_ = reduces_whole() && sendable && receivable;
  n_in_place_ = in_place_ ? 1 : 0;
}

Progress Operation::advance(Circle& circle, Workspace& work) {
  const Progress progress = go_on(circle, work);
  if (progress == Progress::kDone) circle.own().out.store(sequence_, std::memory_order_release);
  return progress;
}

Progress Operation::go_on(Circle& circle, Workspace& work) {
  if (stage_ == Stage::kArriving) {
    if (const Progress p = arrive(circle); p != Progress::kDone) return p;
    choose_path(circle, work);
  }
  switch (stage_) {
    case Stage::kClaiming:
      return reduces_whole() ? claim(circle, work) : copy_direct(circle, work);
    case Stage::kCounting:
      return count_done(circle);
    case Stage::kPlanned:
    case Stage::kLeaving:
      return follow_plan(circle, work);
    default:
      return Progress::kDone;
  }
}

Progress Operation::arrive(Circle& circle) {
  const int size = circle.size();
  for (; peer_ < size; ++peer_) {
    if (peer_ == circle.rank()) continue;
    Arrival& arrival = circle.board(peer_).arrivals[parity()];
    perturb();
    const std::uint64_t entered = arrival.sequence.load(std::memory_order_acquire);
    if (entered >> 1 != sequence_) return Progress::kBlocked;
    if (arrival.fingerprint != fingerprint_) return Progress::kMismatch;
    n_in_place_ += static_cast<int>(entered & 1);
    ++mark_;
  }
  if (is_uneven(op_.kind) && !counts_agree(circle)) return Progress::kUneven;
  peer_ = 0;
  // Whoever gave up after we entered waits for us to be out; whoever did before must be seen here.
  return circle.own().broken.load(std::memory_order_seq_cst) != 0 ? Progress::kBlocked : Progress::kDone;
}

void Operation::retreat(Circle& circle) {
  if (!started()) return;
  Board& own = circle.own();
  own.out.store(sequence_, std::memory_order_seq_cst);
  const Deadline patience = Deadline::after(Milliseconds(circle.single_process() ? 2000 : 50));
  for (int r = 0; r < circle.size(); ++r) {
    Board& other = circle.board(r);
    while (other.arrivals[parity()].sequence.load(std::memory_order_seq_cst) >> 1 == sequence_ &&
           other.out.load(std::memory_order_acquire) < sequence_ && !patience.expired()) {
      ::usleep(20);
    }
  }
}

// All ranks have read the same words by now, so all come to the same answer.
void Operation::choose_path(Circle& circle, Workspace& work) {
  if (can_be_inline(circle.size()) && n_in_place_ == 0) {
    finish_inline(circle, work);
    stage_ = Stage::kDone;
  } else if (reduces_whole() ? n_in_place_ == circle.size() : direct_possible(circle)) {
    stage_ = Stage::kClaiming;
  } else {
    plan_ = make_plan(plan_input(circle));
    stage_ = Stage::kPlanned;
  }
}

bool Operation::direct_possible(Circle& circle) const {
  for (int r = 0; r < circle.size(); ++r) {
    if (call_of(circle, r).reachable == 0) return false;
  }
  return true;
}

const std::uint8_t* Operation::payload_of(Circle& circle, int rank) const {
  if (send_bytes(circle.size()) <= kTinyBytes) return circle.board(rank).arrivals[parity()].payload;
  return circle.board(rank).payload[parity()];
}

void Operation::finish_inline(Circle& circle, Workspace& work) {
  const auto me = static_cast<std::uint64_t>(circle.rank());
  auto* recv = static_cast<std::uint8_t*>(op_.recv);
  switch (op_.kind) {
    case LOCKSTEP_BROADCAST:
      return copy(recv, payload_of(circle, op_.root), n_bytes_);
    case LOCKSTEP_SCATTER:
      return copy(recv, payload_of(circle, op_.root) + me * n_bytes_, n_bytes_);
    case LOCKSTEP_GATHER:
      if (circle.rank() != op_.root) return;
      [[fallthrough]];
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_ALL_TO_ALL: {
      const std::uint64_t at = op_.kind == LOCKSTEP_ALL_TO_ALL ? me * n_bytes_ : 0;
      for (int r = 0; r < circle.size(); ++r) {
        copy(recv + static_cast<std::uint64_t>(r) * n_bytes_, payload_of(circle, r) + at, n_bytes_);
      }
      return;
    }
    case LOCKSTEP_REDUCE:
      if (circle.rank() != op_.root) return;
      [[fallthrough]];
    case LOCKSTEP_ALL_REDUCE:
    case LOCKSTEP_REDUCE_SCATTER: {
      if (n_bytes_ == 0) return;
      const std::uint64_t at = op_.kind == LOCKSTEP_REDUCE_SCATTER ? me * n_bytes_ : 0;
      for (int r = 0; r < circle.size(); ++r)
        work.sources[static_cast<std::size_t>(r)] = payload_of(circle, r) + at;
      void* const target = op_.recv;
      return reduce(op_.dtype, op_.reduce, work.sources, {&target, 1}, op_.count);
    }
    default:
      return;
  }
}

std::uint8_t* Operation::buffer(Circle& circle, int rank, std::uint64_t at, std::uint64_t n_bytes) const {
  if (circle.single_process()) return reinterpret_cast<std::uint8_t*>(at);
  return circle.in_arena(rank, at, n_bytes);
}

// Own slice first, then whatever the others have not got to: a rank that is not running holds nobody up.
Progress Operation::claim(Circle& circle, Workspace& work) {
  const int size = circle.size(), me = circle.rank();
  const Cut cut(op_.count, size, element_);
  auto& send = work.send;
  auto& recv = work.recv;
  // The ranks that get the result: all, or the root alone.
  const bool to_all = op_.kind == LOCKSTEP_ALL_REDUCE;
  const std::size_t n_targets = to_all ? static_cast<std::size_t>(size) : 1;
  for (int r = 0; r < size; ++r) {
    peer_ = r;
    send[static_cast<std::size_t>(r)] = buffer(circle, r, call_of(circle, r).send, n_bytes_);
    if (!send[static_cast<std::size_t>(r)]) return Progress::kBadPeer;
  }
  for (std::size_t t = 0; t < n_targets; ++t) {
    peer_ = to_all ? static_cast<int>(t) : op_.root;
    recv[t] = buffer(circle, peer_, call_of(circle, peer_).recv, n_bytes_);
    if (!recv[t]) return Progress::kBadPeer;
  }
  for (int turn = 0; turn < size; ++turn) {
    const int owner = (me + turn) % size;
    Claims& claims = circle.board(owner).claims[parity()];
    const std::uint64_t n_chunks = cut.n_chunks(owner);
    for (;;) {
      if (claims.next.load(std::memory_order_relaxed) >= n_chunks) break;
      const std::uint64_t index = claims.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= n_chunks) break;
      perturb();
      if (circle.own().broken.load(std::memory_order_relaxed) != 0) break;
      const std::uint64_t first = cut.begin(owner) + index * cut.chunk;
      const std::uint64_t count = std::min(cut.chunk, cut.begin(owner) + cut.length(owner) - first);
      for (int r = 0; r < size; ++r) {
        work.sources[static_cast<std::size_t>(r)] = send[static_cast<std::size_t>(r)] + first * element_;
      }
      for (std::size_t t = 0; t < n_targets; ++t) work.targets[t] = recv[t] + first * element_;
      reduce(op_.dtype, op_.reduce, work.sources, {work.targets.data(), n_targets}, count);
      perturb();
      if (claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks) circle.ring_others();
    }
  }
  ++mark_;
  stage_ = Stage::kCounting;
  peer_ = 0;
  return count_done(circle);
}

Progress Operation::count_done(Circle& circle) {
  const Cut cut(op_.count, circle.size(), element_);
  for (; peer_ < circle.size(); ++peer_) {
    perturb();
    if (circle.board(peer_).claims[parity()].done.load(std::memory_order_acquire) != cut.n_chunks(peer_)) {
      return Progress::kBlocked;
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

// The other direct collectives only read from the others; the buffers are theirs again when all have said so.
Progress Operation::copy_direct(Circle& circle, Workspace& work) {
  const bool scatters_sums = op_.kind == LOCKSTEP_REDUCE_SCATTER;
  if (Progress bad{}; !(scatters_sums ? reduce_direct(circle, work, bad) : move_direct(circle, bad)))
    return bad;
  signal(circle, 1);
  plan_.push_back({.kind = StepKind::kWait, .phase = 1});
  stage_ = Stage::kLeaving;
  peer_ = 0;
  return follow_plan(circle, work);
}

bool Operation::reduce_direct(Circle& circle, Workspace& work, Progress& bad) {
  const auto me = static_cast<std::uint64_t>(circle.rank());
  bad = Progress::kBadPeer;
  for (peer_ = 0; peer_ < circle.size(); ++peer_) {
    const std::uint8_t* from = buffer(circle, peer_, call_of(circle, peer_).send, send_bytes(circle.size()));
    if (from == nullptr) return false;
    work.sources[static_cast<std::size_t>(peer_)] = from + me * n_bytes_;
  }
  void* const target = op_.recv;
  reduce(op_.dtype, op_.reduce, work.sources, {&target, 1}, op_.count);
  return true;
}

bool Operation::move_direct(Circle& circle, Progress& bad) {
  const int size = circle.size(), me = circle.rank();
  const Traffic traffic = traffic_of(plan_input(circle));
  bad = Progress::kBadPeer;
  for (int turn = 0; turn < size; ++turn) {
    peer_ = (me + turn) % size;  // not all from the same rank at once
    const Traffic::Part& part = traffic.receives[static_cast<std::size_t>(peer_)];
    if (part.n_bytes == 0) continue;
    auto* to = static_cast<std::uint8_t*>(op_.recv) + part.at;
    // Where my part lies in the peer's buffer.
    std::uint64_t at = 0;
    if (is_uneven(op_.kind)) at = counts_of(circle, peer_)[me].at;
    if (op_.kind == LOCKSTEP_SCATTER || op_.kind == LOCKSTEP_ALL_TO_ALL)
      at = static_cast<std::uint64_t>(me) * n_bytes_;
    const std::uint8_t* from = peer_ == me
                                   ? static_cast<const std::uint8_t*>(op_.send) + at
                                   : buffer(circle, peer_, call_of(circle, peer_).send + at, part.n_bytes);
    if (from == nullptr) return false;
    copy(to, from, part.n_bytes);
  }
  return true;
}

Progress Operation::follow_plan(Circle& circle, Workspace& work) {
  for (; next_step_ < plan_.size(); ++next_step_, ++mark_) {
    const Step& step = plan_[next_step_];
    if (step.kind == StepKind::kWait) {
      if (!reached(circle, step)) return Progress::kBlocked;
      peer_ = 0;
    } else {
      if (circle.own().broken.load(std::memory_order_relaxed) != 0) return Progress::kBlocked;
      execute(step, circle, work);
    }
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

bool Operation::reached(Circle& circle, const Step& step) {
  const std::uint64_t target = sequence_ << kPhaseBits | step.phase;
  if (step.peer >= 0) peer_ = step.peer;
  for (; peer_ < circle.size(); ++peer_) {
    if (peer_ == circle.rank()) continue;
    perturb();
    if (circle.board(peer_).step.load(std::memory_order_acquire) < target) return false;
    if (step.peer >= 0) break;
  }
  return true;
}

void Operation::signal(Circle& circle, std::uint32_t phase) {
  perturb();
  circle.own().step.store(sequence_ << kPhaseBits | phase, std::memory_order_seq_cst);
  circle.ring_others();
}

void Operation::execute(const Step& step, Circle& circle, Workspace& work) {
  const auto* send = static_cast<const std::uint8_t*>(op_.send);
  auto* recv = static_cast<std::uint8_t*>(op_.recv);
  const auto stage_in = [&](int r) { return stage_of(circle, r).in[step.parity] + step.stage_at; };
  const auto stage_out = [&](int r) { return stage_of(circle, r).out[step.parity]; };
  switch (step.kind) {
    case StepKind::kCopyIn:
      return copy(stage_in(circle.rank()), send + step.user_at, step.n_bytes);
    case StepKind::kCopyOut:
      return copy(recv + step.recv_at,
                  step.from_in ? stage_in(step.peer) : stage_out(step.peer) + step.stage_at, step.n_bytes);
    case StepKind::kKeep:
      return copy(recv + step.recv_at, send + step.user_at, step.n_bytes);
    case StepKind::kReduce: {
      for (int r = 0; r < circle.size(); ++r) {
        work.sources[static_cast<std::size_t>(r)] = r == circle.rank() ? send + step.user_at : stage_in(r);
      }
      void* const targets[] = {recv + step.recv_at, stage_out(circle.rank())};
      const std::size_t first = step.keep ? 0 : 1,
                        n_targets = (step.keep ? 1u : 0u) + (step.publish ? 1u : 0u);
      return reduce(op_.dtype, op_.reduce, work.sources, {targets + first, n_targets},
                    step.n_bytes / element_);
    }
    case StepKind::kSignal:
      return signal(circle, step.phase);
    case StepKind::kWait:
      return;
  }
}

}  // namespace lockstep::comm::internal
