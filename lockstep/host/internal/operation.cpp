// What all paths of a collective begin with: the call is published, the arrivals of the others are compared,
// and the path is chosen. The paths are in operation_direct.cpp and operation_staged.cpp.
#include "lockstep/host/internal/operation.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {

Operation::Operation(const lockstep_op& op)
    : op_(op),
      send_(static_cast<const std::uint8_t*>(op.send)),
      recv_(static_cast<std::uint8_t*>(op.recv)),
      send_rows_(std::max<std::uint64_t>(op.send_rows, 1)),
      element_(size_of(op.dtype)),
      n_bytes_(op.count * element_),
      fingerprint_(internal::fingerprint(op)) {}

// The caller's arrays need not outlive the call that posts; from here on the operation has its own copy, in
// bytes.
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

// Bytes of this rank's buffer that the others may read. Equal on all ranks, except for the kinds with counts
// per peer.
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

void Operation::start(CommMembers& members, std::uint64_t sequence) {
  sequence_ = sequence;
  stage_ = Stage::kArriving;
  const std::uint64_t sent = send_bytes(members.size());
  publish_call(members);
  CommBlock& own = members.own();
  Arrival& arrival = own.arrivals[parity()];
  // Plain and relaxed stores: nobody reads this copy since operation sequence - 2 (layout.h), and the store
  // of `sequence` below releases all of it.
  arrival.fingerprint = fingerprint_;
  own.claims[parity()].next.store(0, std::memory_order_relaxed);
  own.claims[parity()].done.store(0, std::memory_order_relaxed);
  if (in_place_) {
    // The others access the buffers themselves.
  } else if (is_uneven(op_.kind)) {
    publish_counts(members);
  } else if (can_be_inline(members.size()) && sends(members.rank())) {
    copy_bytes(const_cast<std::uint8_t*>(payload_of(members, members.rank())), op_.send, sent);
  }
  perturb();
  // seq_cst: before ring_others() checks for sleepers.
  arrival.sequence.store(sequence << 1 | (in_place_ ? 1u : 0u), std::memory_order_seq_cst);
  members.ring_others();
}

// In these two kinds only the root sends.
bool Operation::sends(int rank) const {
  return (op_.kind != LOCKSTEP_BROADCAST && op_.kind != LOCKSTEP_SCATTER) || rank == op_.root;
}

// In these two kinds only the root receives.
bool Operation::receives(int rank) const {
  return (op_.kind != LOCKSTEP_REDUCE && op_.kind != LOCKSTEP_GATHER) || rank == op_.root;
}

// All of the root's result in a gather. In the kinds without a root that do not reduce the whole, ranks only
// read from each other, and discard what they read from a broken group (believable()).
std::uint64_t Operation::written_bytes(CommMembers& members) const {
  if (!(reduces_whole() || has_root(op_.kind)) || !receives(members.rank())) return 0;
  return op_.kind == LOCKSTEP_GATHER ? n_bytes_ * static_cast<std::uint64_t>(members.size()) : n_bytes_;
}

// The counts take the room of an inline payload, which these kinds never use (can_be_inline). Published
// before the arrival, like everything that the others read after it.
void Operation::publish_counts(CommMembers& members) {
  auto* table = const_cast<Counts*>(counts_of(members, members.rank()));
  const Traffic traffic = traffic_of(plan_input(members));
  for (std::size_t r = 0; r < traffic.sends.size(); ++r) {
    const Traffic::Part& part = traffic.sends[r];
    table[r] = {part.at / send_rows_, part.n_bytes, traffic.receives[r].n_bytes, part.n_bytes / send_rows_};
  }
}

const Counts* Operation::counts_of(CommMembers& members, int rank) const {
  return reinterpret_cast<const Counts*>(members.block(rank).payload[parity()]);
}

// Every rank checks every pair, so all get the same answer and none begins to move data that another rank has
// given up.
bool Operation::counts_agree(CommMembers& members) {
  for (int from = 0; from < members.size(); ++from) {
    for (int to = 0; to < members.size(); ++to) {
      peer_ = from;
      uneven_receiver_ = to;
      if (counts_of(members, from)[to].sends != counts_of(members, to)[from].expects) return false;
    }
  }
  return true;
}

PlanInput Operation::plan_input(CommMembers& members) const {
  return {.kind = op_.kind,
          .rank = members.rank(),
          .size = members.size(),
          .root = op_.root,
          .n_bytes = n_bytes_,
          .stage_in_bytes = kStageInBytes,
          .stage_out_bytes = kStageOutBytes,
          .send_bytes = uneven_sends_,
          .recv_bytes = uneven_receives_};
}

// Writes the record from which the others take the buffers, and the text of error messages.
void Operation::publish_call(CommMembers& members) {
  PublishedCall& call = members.own().history[sequence_ % kHistory];
  call.number = number();
  call.fingerprint = fingerprint_;
  const std::string_view where = op_.where != nullptr ? op_.where : "";
  // The end of a long path says more than its beginning.
  const std::size_t length = std::min(where.size(), sizeof(call.where) - 1);
  where.copy(call.where, length, where.size() - length);
  call.where[length] = '\0';
  const std::uint64_t sent = send_bytes(members.size());
  if (sent <= kEagerBytes && !is_uneven(op_.kind)) return;
  // First: a buffer that is severed after it was published must be found out (believable()).
  n_severed_ = members.arena().n_severed();
  call.send_reach = sends(members.rank()) ? publish(members, send_, sent, call.send) : Reach::kByAddress;
  const bool mapped = call.send_reach == Reach::kInArena || call.send_reach == Reach::kByAddress;
  if (send_rows_ > 1 && !mapped) {  // a copy by the kernel takes one run
    pack_send(members);
    call.send_reach = publish(members, send_, sent, call.send);
  }
  const std::uint64_t written = written_bytes(members);
  call.recv_reach = written > 0 ? publish(members, op_.recv, written, call.recv) : Reach::kByAddress;
  const bool by_kernel = call.send_reach == Reach::kByKernel || call.recv_reach == Reach::kByKernel;
  // A chunk is written to the results of all ranks by the one that claimed it, so both buffers must be
  // reachable. Small ordinary memory is cheaper as a payload.
  in_place_ = reduces_whole() && call.send_reach != Reach::kNowhere && call.recv_reach != Reach::kNowhere &&
              (!by_kernel || sent > kInlineBytes);
  n_in_place_ = in_place_ ? 1 : 0;
}

// A part of the rows must not be published: a rank that does not know yet that the group is broken would take
// it for the whole. The failure that the group broke with is reported instead of the one raised here.
void Operation::pack_send(CommMembers& members) {
  const Deadline until = Deadline::from_monotonic_ns(op_.deadline_ns);
  packed_send_ = pack_rows(send_, send_rows_, uneven_sends_, members.own().broken, until);
  if (!packed_send_) {
    base::raise(ErrorKind::kTimeout,
                base::cat("rank ", members.rank(), " ran out of time while it packed the rows of ",
                          describe_call(fingerprint_)),
                ErrorFamily::kBackend);
  }
  send_ = packed_send_.get();
  send_rows_ = 1;
}

// While one exists, this rank may access the others' buffers. A rank that gives up stores `broken` everywhere
// and then loads `inside`; this rank stores `inside` and then loads `broken` (allowed()). All four are
// sequentially consistent, so one of the two sees the other: either this rank stays out, or the other waits
// for it. The destructor releases: what was written is visible to the rank that finds `inside` changed.
class Operation::Inside {
 public:
  Inside(CommBlock& own, std::uint64_t sequence) : own_(own) {
    own.inside.store(sequence, std::memory_order_seq_cst);
  }
  ~Inside() { own_.inside.store(0, std::memory_order_release); }
  Inside(const Inside&) = delete;
  bool allowed() const { return own_.broken.load(std::memory_order_seq_cst) == 0; }

 private:
  CommBlock& own_;
};

Progress Operation::advance(CommMembers& members, Workspace& work) {
  const Progress progress = advance_stage(members, work);
  return progress == Progress::kDone && direct_ && !believable(members) ? Progress::kBlocked : progress;
}

// A rank that gives up breaks the group before it reuses its buffers. So if the group is intact now, it was
// intact when the last byte was read; in a broken group the bytes read may be anything.
bool Operation::believable(CommMembers& members) const {
  // The compiler must not move the reads of the bytes behind the load of the flag; x86-64 itself does not
  // reorder loads. (TSan does not support a thread fence.)
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (members.own().broken.load(std::memory_order_seq_cst) != 0) return false;
  const Arena& arena = members.arena();
  if (arena.n_severed() != n_severed_ && call_of(members, members.rank()).recv_reach == Reach::kInArena &&
      !arena.contains(op_.recv, written_bytes(members))) {
    base::raise(ErrorKind::kInternal, "the buffer shares a page with one that was taken from a stopped rank",
                ErrorFamily::kBackend);
  }
  return true;
}

Progress Operation::advance_stage(CommMembers& members, Workspace& work) {
  // peer_ remembers how far the last call came, so a blocked operation does not begin again with rank 0.
  if (stage_ == Stage::kArriving) {
    if (const Progress p = arrive(members); p != Progress::kDone) return p;
    choose_path(members, work);
  }
  switch (stage_) {
    case Stage::kClaiming: {
      const Inside inside(members.own(), sequence_);
      if (!inside.allowed()) return Progress::kBlocked;
      if (reduces_whole()) return n_bytes_ < kClaimFrom ? reduce_own(members, work) : claim(members, work);
      return has_root(op_.kind) ? move_rooted(members) : copy_direct(members, work);
    }
    case Stage::kCounting:
      return reduces_whole() ? count_done(members) : count_moved(members);
    case Stage::kPlanned:
    case Stage::kLeaving:
      return follow_plan(members, work);
    default:
      return Progress::kDone;
  }
}

Progress Operation::arrive(CommMembers& members) {
  const int size = members.size();
  for (; peer_ < size; ++peer_) {
    if (peer_ == members.rank()) continue;
    Arrival& arrival = members.block(peer_).arrivals[parity()];
    perturb();
    // acquire: with the release in start(). An older number means not yet; a newer one cannot be, since that
    // rank would have to have finished this operation without us.
    const std::uint64_t entered = arrival.sequence.load(std::memory_order_acquire);
    if (entered >> 1 != sequence_) return Progress::kBlocked;
    if (arrival.fingerprint != fingerprint_) return Progress::kMismatch;
    n_in_place_ += static_cast<int>(entered & 1);
    ++mark_;
  }
  if (is_uneven(op_.kind) && !counts_agree(members)) return Progress::kUneven;
  peer_ = 0;
  return Progress::kDone;
}

// One deadline for all ranks, not one each: with many stopped processes the caller waits once.
void Operation::await_buffers_free(CommMembers& members) {
  const std::uint64_t n_written = written_bytes(members);
  const Deadline now = Deadline::now();
  for (int r = 0; started() && r < members.size(); ++r) {
    const auto inside = [&] { return members.block(r).inside.load(std::memory_order_seq_cst) == sequence_; };
    take_back(members, r, op_.recv, n_written, std::ref(inside), now);  // a reference needs no memory
  }
}

// Every rank decides from what all ranks have published, so all decide alike.
// A rank that arrived in place has no payload beside its arrival, so one such rank rules the inline path out;
// and a reduction in place needs the buffers of all. What remains, ranks of both kinds, is staged.
void Operation::choose_path(CommMembers& members, Workspace& work) {
  if (can_be_inline(members.size()) && n_in_place_ == 0) {
    finish_inline(members, work);
    stage_ = Stage::kDone;
  } else if (reduces_whole() ? n_in_place_ == members.size() : direct_possible(members)) {
    direct_ = true;
    stage_ = Stage::kClaiming;
  } else {
    plan_ = make_plan(plan_input(members));
    stage_ = Stage::kPlanned;
    // Staging areas take one run.
    if (send_rows_ > 1) pack_send(members);
    if (op_.recv_rows > 1) {
      const auto parts = received_parts(members);
      packed_recv_ = std::make_unique_for_overwrite<std::uint8_t[]>(
          std::accumulate(parts.begin(), parts.end(), std::uint64_t{0}));
      recv_ = packed_recv_.get();
    }
  }
}

// Every sender's buffer can be read.
// Receive buffers do not matter: in these kinds the receiver reads. (In rooted kinds the sender also writes,
// where it can.)
bool Operation::direct_possible(CommMembers& members) const {
  for (int r = 0; r < members.size(); ++r) {
    if (call_of(members, r).send_reach == Reach::kNowhere) return false;
  }
  return true;
}

const std::uint8_t* Operation::payload_of(CommMembers& members, int rank) const {
  if (send_bytes(members.size()) <= kTinyBytes) return members.block(rank).arrivals[parity()].payload;
  return members.block(rank).payload[parity()];
}

}  // namespace lockstep::comm::internal
