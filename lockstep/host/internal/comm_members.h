// The ranks of one communicator and their blocks: a selection of the host's ranks (host_peers.h), in an order
// of its own. What operations, messages and the failure record see of the other ranks.
// Thread safety: constant after construction, except for the shared memory itself, and own_stage() and
// keep_until_released(), which are for the thread that drives the communicator.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/host_peers.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {

// A new block in the arena, for a communicator of `size` ranks.
CommBlock* make_comm_block(Arena& arena, int rank, int size);

class CommMembers {
 public:
  // All ranks of HostPeers, with the blocks it was created with.
  explicit CommMembers(HostPeers& host_peers);
  // Some of them: `members` are their ranks in HostPeers, `blocks` the offsets of their blocks in their
  // arenas; this rank is the `rank`-th (split.h finds them).
  CommMembers(HostPeers& host_peers, int rank, std::span<const int> members,
              std::span<const std::uint64_t> blocks);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(blocks_.size()); }
  // All ranks are threads of this process: an address of one is valid for all.
  bool single_process() const { return single_process_; }
  // The kernel lets every rank copy from and to every other.
  bool kernel_copies() const { return kernel_copies_; }
  bool same_process(int rank) { return peer(rank).same_process && may_share_process(); }

  CommBlock& block(int rank) { return *blocks_[static_cast<std::size_t>(rank)]; }
  CommBlock& own() { return *blocks_[static_cast<std::size_t>(rank_)]; }
  local::Doorbell& doorbell(int rank) { return peer(rank).header->doorbell; }
  // Wakes a rank, or all others, if they sleep. Pre: what they wait for was stored with sequential
  // consistency.
  void ring(int rank);
  void ring_others();
  // Whether a rank had to be woken since the last call of this: its answer takes as long as the wake-up does.
  bool woke_someone() {
    return woke_.load(std::memory_order_relaxed) && woke_.exchange(false, std::memory_order_relaxed);
  }

  Arena& arena() { return host_peers_.arena(); }
  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }
  int host_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  // The rank here of a rank of HostPeers, or -1.
  int rank_of(int host_rank) const;
  std::int64_t pid(int rank) { return peer(rank).pid; }

  // [at, at + n_bytes) of a rank's arena; null when that is not in its heap.
  std::uint8_t* in_arena(int rank, std::uint64_t at, std::uint64_t n_bytes);
  // This rank's staging area, allocated on first use. Raises kResource.
  Stage& own_stage();
  // Another rank's; null when it has none, which it should have.
  Stage* stage(int rank);

  // Blocks of the arena that the others may read for as long as they are members.
  void keep_until_released(void* block) { kept_.push_back(block); }
  // The last thing a member does. The blocks and the own block may be freed when all_released().
  void release();
  bool all_released() {
    return own().released.load(std::memory_order_acquire) == static_cast<std::uint32_t>(size());
  }
  void free_kept();

 private:
  void add(int host_rank, std::uint64_t block_at, int n_ranks);

  HostPeers& host_peers_;
  int rank_ = -1;
  std::atomic<bool> woke_{false};
  bool single_process_ = true;
  bool kernel_copies_ = true;
  std::vector<int> ranks_;
  std::vector<Peer*> peers_;
  std::vector<CommBlock*> blocks_;
  std::vector<void*> kept_;
};

}  // namespace lockstep::comm::internal
