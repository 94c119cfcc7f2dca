// One collective on one rank, as a state machine that never waits: advance() goes as far as the other ranks
// allow and returns whether it is done or blocked. The thread that drives the communicator calls it again
// when something has changed.
//
//   kNew --start--> kArriving --all have arrived, same call--+--> kDone                       inline: the payloads are here
//                                                            |
//                                                            +--> kClaiming --+--> kCounting  chunks that any rank may claim
//                                                            |      direct    |        '--> kDone once all chunks are done
//                                                            |                '--> kLeaving   own slice reduced, or own data read
//                                                            |                         '--> kDone once all ranks are there
//                                                            '--> kPlanned ------> kDone      staged: the steps of a plan (plan.h)
//
// All ranks take the same path: it depends only on what they have published before they arrived.
//
// When an operation is done, no other rank accesses this rank's buffers any more: in kCounting because every
// chunk is done, in kLeaving because all ranks have signalled that they are, inline and staged because the
// others only read copies. A failed operation gets the guarantee for writes from await_buffers_free().
// Thread safety: one driver at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/host/internal/rows.h"
#include "lockstep/host/plan.h"

namespace lockstep::comm::internal {

// kUneven: two ranks disagree on how much one sends the other. kBadPeer: a rank published a buffer outside
// its arena.
enum class Progress : std::uint8_t { kDone, kBlocked, kMismatch, kUneven, kBadPeer };

// Room for the pointer lists of a reduction, one entry per rank; owned by the driver.
struct Workspace {
  explicit Workspace(int size)
      : sources(static_cast<std::size_t>(size)),
        targets(static_cast<std::size_t>(size)),
        send(static_cast<std::size_t>(size)),
        recv(static_cast<std::size_t>(size)) {}
  std::vector<const void*> sources;
  std::vector<void*> targets;
  // The ranks' whole buffers in a direct reduction; recv only of those that get the result.
  std::vector<BufferRef> send;
  std::vector<BufferRef> recv;
  std::vector<std::uint8_t> scratch;  // what comes and goes through the kernel
};

class Operation {
 public:
  // Pre: the call was checked (host_engine.cpp). `op.where` must live until start().
  explicit Operation(const lockstep_op& op);
  // Copies the counts of a kind with counts per peer; to be called while the caller's arrays exist.
  void take_counts(int rank, int size);

  bool started() const { return stage_ != Stage::kNew; }
  // Publishes the call, with the payload when it is small.
  void start(CommMembers& members, std::uint64_t sequence);
  Progress advance(CommMembers& members, Workspace& work);
  // After a failure that broke the communicator: returns when no other rank writes into this rank's buffers
  // any more. A process that is stopped cannot confirm that: after a bounded time the memory is taken from it
  // (take_back).
  void await_buffers_free(CommMembers& members);

  // While blocked or after kMismatch or kBadPeer: the rank it waits for, or that caused it.
  int peer() const { return peer_; }
  // After kUneven: peer() sends this one another amount than it expects.
  int uneven_receiver() const { return uneven_receiver_; }
  bool entered_by(CommMembers& members, int rank) const {
    return members.block(rank).arrivals[parity()].sequence.load(std::memory_order_acquire) >> 1 == sequence_;
  }
  std::uint64_t sequence() const { return sequence_; }
  // The caller's number; the sequence when the caller has none.
  std::uint64_t number() const { return op_.tag != 0 ? static_cast<std::uint64_t>(op_.tag) : sequence_; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  // Changes whenever advance() makes progress.
  std::uint64_t mark() const { return mark_; }
  const lockstep_op& call() const { return op_; }

 private:
  enum class Stage : std::uint8_t { kNew, kArriving, kClaiming, kCounting, kPlanned, kLeaving, kDone };

  class Inside;

  Progress advance_stage(CommMembers& members, Workspace& work);
  // Arrivals, in rank order.
  Progress arrive(CommMembers& members);
  void choose_path(CommMembers& members, Workspace& work);
  void finish_inline(CommMembers& members, Workspace& work);
  // Direct paths.
  // Both booleans: false when what peer_ published about its buffer cannot be true.
  bool find_buffers(CommMembers& members, Workspace& work);
  Progress pull_all(CommMembers& members, Workspace& work);
  // This rank's part in the buffer of peer_; nothing when what it published cannot be true.
  std::optional<Runs> find_part(CommMembers& members, std::uint64_t n_bytes);
  bool move_pair(CommMembers& members, int other);
  // False when a write was revoked (push.h): the group is broken.
  bool reduce_range(CommMembers& members, Workspace& work, std::uint64_t first, std::uint64_t count,
                    std::uint64_t skip);
  Progress reduce_own(CommMembers& members, Workspace& work);
  Progress claim(CommMembers& members, Workspace& work);
  Progress count_done(CommMembers& members);
  Progress copy_direct(CommMembers& members, Workspace& work);
  Progress move_rooted(CommMembers& members);
  Progress count_moved(CommMembers& members);
  Progress leave_together(CommMembers& members, Workspace& work);
  // Staged path.
  Progress follow_plan(CommMembers& members, Workspace& work);
  void execute(const Step& step, CommMembers& members, Workspace& work);
  bool reached(CommMembers& members, const Step& step);
  void signal(CommMembers& members, std::uint32_t phase);

  const std::uint8_t* payload_of(CommMembers& members, int rank) const;
  bool direct_possible(CommMembers& members) const;
  bool believable(CommMembers& members) const;
  const PublishedCall& call_of(CommMembers& members, int rank) const {
    return members.block(rank).history[sequence_ % kHistory];
  }

  bool can_be_inline(int size) const { return send_bytes(size) <= kInlineBytes && !is_uneven(op_.kind); }
  void publish_call(CommMembers& members);
  // Raises when the group broke or the time was up meanwhile: then nothing is published.
  void pack_send(CommMembers& members);
  // Bytes of each peer's part of the result, for the kinds that take rows there.
  std::vector<std::uint64_t> received_parts(CommMembers& members) const;
  void publish_counts(CommMembers& members);
  const Counts* counts_of(CommMembers& members, int rank) const;
  bool counts_agree(CommMembers& members);
  PlanInput plan_input(CommMembers& members) const;
  std::uint64_t send_bytes(int size) const;
  // Bytes of this rank's result that the others may write.
  std::uint64_t written_bytes(CommMembers& members) const;
  bool sends(int rank) const;
  bool receives(int rank) const;
  bool reduces_whole() const { return op_.kind == LOCKSTEP_ALL_REDUCE || op_.kind == LOCKSTEP_REDUCE; }
  std::size_t parity() const { return sequence_ & 1; }

  const lockstep_op op_;
  // Where this rank's bytes are: the caller's buffers, or copies of them without rows.
  const std::uint8_t* send_;
  std::uint8_t* recv_;
  std::uint64_t send_rows_;
  std::unique_ptr<std::uint8_t[]> packed_send_, packed_recv_;
  const std::uint64_t element_;
  const std::uint64_t n_bytes_;  // count * element
  const std::uint64_t fingerprint_;
  std::uint64_t sequence_ = 0;
  std::uint64_t mark_ = 0;
  Stage stage_ = Stage::kNew;
  bool in_place_ = false;        // this rank's buffers can be reduced in place
  bool by_kernel_ = false;       // some buffer of a direct reduction is not mapped here
  bool direct_ = false;          // it reads from the others' buffers
  std::uint32_t n_severed_ = 0;  // of the arena, when the buffers were published
  int n_in_place_ = 0;           // ranks whose buffers can be reduced in place
  int peer_ = 0;                 // next rank to check, or the one that caused a failure
  // Bytes per peer, for the kinds with counts per peer.
  std::vector<std::uint64_t> uneven_sends_, uneven_receives_;
  std::uint64_t uneven_sent_ = 0;
  int uneven_receiver_ = -1;
  std::vector<Step> plan_;
  std::size_t next_step_ = 0;
};

}  // namespace lockstep::comm::internal
