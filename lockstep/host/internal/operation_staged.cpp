// The paths of a collective that go through copies: payloads beside the arrivals, and staging areas as a plan
// says (plan.h). The others never access this rank's buffers.
#include <atomic>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/operation.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/rows.h"
#include "lockstep/host/kernels.h"

namespace lockstep::comm::internal {
namespace {

// A plan reads a rank's staging area only after a phase for which that rank has stored its offset.
Stage& stage_of(CommMembers& members, int rank) {
  if (rank == members.rank()) return members.own_stage();
  Stage* stage = members.stage(rank);
  if (stage == nullptr)
    base::raise(ErrorKind::kInternal, base::cat("rank ", rank, " has no staging area"),
                ErrorFamily::kBackend);
  return *stage;
}

}  // namespace

// All payloads are here: every rank computes the whole result for itself, in rank order, without a second
// wait. The own payload is read from the block too, so it does not matter whether op_.recv overlaps op_.send.
void Operation::finish_inline(CommMembers& members, Workspace& work) {
  const auto me = static_cast<std::uint64_t>(members.rank());
  auto* recv = recv_;
  switch (op_.kind) {
    case LOCKSTEP_BROADCAST:
      return copy_bytes(recv, payload_of(members, op_.root), n_bytes_);
    case LOCKSTEP_SCATTER:
      return copy_bytes(recv, payload_of(members, op_.root) + me * n_bytes_, n_bytes_);
    case LOCKSTEP_GATHER:
      if (members.rank() != op_.root) return;
      [[fallthrough]];
    case LOCKSTEP_ALL_GATHER:
    case LOCKSTEP_ALL_TO_ALL: {
      const std::uint64_t at = op_.kind == LOCKSTEP_ALL_TO_ALL ? me * n_bytes_ : 0;
      const auto whole = n_bytes_ * static_cast<std::uint64_t>(members.size());
      // Not the group's flag: all have arrived and the payloads stay where they are, so that the operation
      // ends well here too when a rank that was quicker has failed since.
      static constinit const std::atomic<std::uint32_t> never{0};
      for (int r = 0; r < members.size(); ++r) {
        const auto to = Runs::part_of(own_buffer(recv), op_.recv_rows, whole,
                                      static_cast<std::uint64_t>(r) * n_bytes_, n_bytes_);
        const Runs from{own_buffer(payload_of(members, r) + at), n_bytes_, n_bytes_};
        copy_runs(to, from, n_bytes_, 0, never, work.scratch);
      }
      return;
    }
    case LOCKSTEP_REDUCE:
      if (members.rank() != op_.root) return;
      [[fallthrough]];
    case LOCKSTEP_ALL_REDUCE:
    case LOCKSTEP_REDUCE_SCATTER: {
      if (n_bytes_ == 0) return;
      const std::uint64_t at = op_.kind == LOCKSTEP_REDUCE_SCATTER ? me * n_bytes_ : 0;
      for (int r = 0; r < members.size(); ++r)
        work.sources[static_cast<std::size_t>(r)] = payload_of(members, r) + at;
      void* const target = op_.recv;
      return reduce(op_.dtype, op_.reduce, work.sources, {&target, 1}, op_.count);
    }
    default:
      return;
  }
}

// The check for `broken` is relaxed and only bounds how much is copied for nothing. It is not needed for
// safety: a plan reads and writes arenas, and this rank's own buffers, which are the caller's only after the
// operation has returned.
Progress Operation::follow_plan(CommMembers& members, Workspace& work) {
  for (; next_step_ < plan_.size(); ++next_step_, ++mark_) {
    const Step& step = plan_[next_step_];
    if (step.kind == StepKind::kWait) {
      if (!reached(members, step)) return Progress::kBlocked;
      peer_ = 0;
    } else {
      if (members.own().broken.load(std::memory_order_relaxed) != 0) return Progress::kBlocked;
      execute(step, members, work);
    }
  }
  if (packed_recv_ && !unpack_rows(op_.recv, op_.recv_rows, received_parts(members), packed_recv_.get(),
                                   members.own().broken)) {
    return Progress::kBlocked;
  }
  stage_ = Stage::kDone;
  return Progress::kDone;
}

std::vector<std::uint64_t> Operation::received_parts(CommMembers& members) const {
  if (is_uneven(op_.kind)) return uneven_receives_;
  return std::vector<std::uint64_t>(static_cast<std::size_t>(members.size()), n_bytes_);
}

bool Operation::reached(CommMembers& members, const Step& step) {
  // Steps only grow, across operations too: a rank that is already in the next operation has passed every
  // phase of this one.
  const std::uint64_t target = sequence_ << kPhaseBits | step.phase;
  if (step.peer != kAllOthers) peer_ = step.peer;
  for (; peer_ < members.size(); ++peer_) {
    if (peer_ == members.rank()) continue;
    perturb();
    if (members.block(peer_).step.load(std::memory_order_acquire) < target) return false;
    if (step.peer != kAllOthers) break;
  }
  return true;
}

// The store releases what was staged or read before; seq_cst: before ring_others() checks for sleepers.
void Operation::signal(CommMembers& members, std::uint32_t phase) {
  perturb();
  members.own().step.store(sequence_ << kPhaseBits | phase, std::memory_order_seq_cst);
  members.ring_others();
}

void Operation::execute(const Step& step, CommMembers& members, Workspace& work) {
  const auto* send = send_;
  auto* recv = recv_;
  const auto stage_in = [&](int r) { return stage_of(members, r).in[step.parity] + step.stage_at; };
  const auto stage_out = [&](int r) { return stage_of(members, r).out[step.parity]; };
  switch (step.kind) {
    case StepKind::kCopyIn:
      return copy_bytes(stage_in(members.rank()), send + step.user_at, step.n_bytes);
    case StepKind::kCopyOut: {
      const auto* from = step.from_in ? stage_in(step.peer) : stage_out(step.peer) + step.stage_at;
      // A large result that is only moved bypasses the caches (buffer_ref.h).
      return copy(own_buffer(recv + step.recv_at), own_buffer(from), step.n_bytes,
                  has_reduce(op_.kind) ? 0 : n_bytes_);
    }
    case StepKind::kKeep:
      return copy_bytes(recv + step.recv_at, send + step.user_at, step.n_bytes);
    case StepKind::kReduce: {
      for (int r = 0; r < members.size(); ++r) {
        work.sources[static_cast<std::size_t>(r)] = r == members.rank() ? send + step.user_at : stage_in(r);
      }
      void* const targets[] = {recv + step.recv_at, stage_out(members.rank())};
      const std::size_t first = step.keep ? 0 : 1,
                        n_targets = (step.keep ? 1u : 0u) + (step.publish ? 1u : 0u);
      return reduce(op_.dtype, op_.reduce, work.sources, {targets + first, n_targets},
                    step.n_bytes / element_);
    }
    case StepKind::kSignal:
      return signal(members, step.phase);
    case StepKind::kWait:
      return;
  }
}

}  // namespace lockstep::comm::internal
