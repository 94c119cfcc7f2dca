// The ranks of one communicator and where their boards lie: a selection of a fabric's ranks, in an order of its own.
// What operations, mail and the ledger see of the others.
// Thread safety: constant after construction, but for the shared memory itself and own_stage(), which belongs to
// whoever drives the communicator.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/fabric.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {

// A new board in the arena, for a communicator of `size` ranks.
Board* make_board(Arena& arena, int rank, int size);

class Circle {
 public:
  // All ranks of the fabric, on the boards it was made with.
  explicit Circle(Fabric& fabric);
  // Some of them: `members` are their ranks in the fabric, `boards` where their boards lie in their arenas; this rank is
  // the `rank`-th (split.h finds them).
  Circle(Fabric& fabric, int rank, std::span<const int> members, std::span<const std::uint64_t> boards);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(boards_.size()); }
  // All ranks are threads of this process: any address of one is good for all.
  bool single_process() const { return single_process_; }
  // The kernel lets every rank copy from and to every other.
  bool kernel_copies() const { return kernel_copies_; }
  bool same_process(int rank) { return peer(rank).same_process && may_share_process(); }

  Board& board(int rank) { return *boards_[static_cast<std::size_t>(rank)]; }
  Board& own() { return *boards_[static_cast<std::size_t>(rank_)]; }
  local::Doorbell& doorbell(int rank) { return peer(rank).station->doorbell; }
  // Whoever published something for a rank, or for all others, wakes them if they sleep.
  void ring(int rank);
  void ring_others();
  // Whether a rank had to be woken since the last time this was asked: its answer will take as long as that does.
  bool woke_someone() {
    return woke_.load(std::memory_order_relaxed) && woke_.exchange(false, std::memory_order_relaxed);
  }

  Arena& arena() { return fabric_.arena(); }
  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }
  int fabric_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  // The rank here of a rank of the fabric, or -1.
  int rank_of(int fabric_rank) const;
  std::int64_t pid(int rank) { return peer(rank).pid; }

  // [at, at + n_bytes) of a rank's arena; null when it does not lie in its heap.
  std::uint8_t* in_arena(int rank, std::uint64_t at, std::uint64_t n_bytes);
  // This rank's staging area, made when first asked for. Raises kResource.
  Stage& own_stage();
  // Another's; null when it has none, which is its fault.
  Stage* stage(int rank);

  // Blocks of the arena that others may look into for as long as they are members.
  void keep_until_departed(void* block) { blocks_.push_back(block); }
  // The last thing a member does. The blocks and the own board may be freed when all have departed().
  void depart();
  bool all_departed() {
    return own().departed.load(std::memory_order_acquire) == static_cast<std::uint32_t>(size());
  }
  void free_blocks();

 private:
  void add(int fabric_rank, std::uint64_t board_at, int n_ranks);

  Fabric& fabric_;
  int rank_ = -1;
  std::atomic<bool> woke_{false};
  bool single_process_ = true;
  bool kernel_copies_ = true;
  std::vector<int> members_;
  std::vector<Peer*> peers_;
  std::vector<Board*> boards_;
  std::vector<void*> blocks_;
};

}  // namespace lockstep::comm::internal
