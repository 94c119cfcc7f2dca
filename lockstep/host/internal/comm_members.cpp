#include "lockstep/host/internal/comm_members.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {

CommBlock* make_comm_block(Arena& arena, int rank, int size) {
  auto* block = new (arena.allocate_block(CommBlock::bytes(size))) CommBlock();
  block->magic = kLayoutMagic;
  block->rank = rank;
  block->size = size;
  block->address = reinterpret_cast<std::uintptr_t>(block);
  for (int r = 0; r < size; ++r) {
    new (block->send_queues() + r) std::atomic<std::uint64_t>(0);
    new (block->receipts() + r) std::atomic<std::uint64_t>(0);
    block->members()[r] = block->blocks()[r] = 0;
  }
  return block;
}

CommMembers::CommMembers(HostPeers& host_peers) : host_peers_(host_peers), rank_(host_peers.rank()) {
  for (int r = 0; r < host_peers.size(); ++r) add(r, host_peers.peer(r).header->block_at, host_peers.size());
}

CommMembers::CommMembers(HostPeers& host_peers, int rank, std::span<const int> members,
                         std::span<const std::uint64_t> blocks)
    : host_peers_(host_peers), rank_(rank) {
  const int size = static_cast<int>(members.size());
  for (std::size_t r = 0; r < members.size(); ++r) add(members[r], blocks[r], size);
}

void CommMembers::add(int host_rank, std::uint64_t block_at, int n_ranks) {
  Peer& peer = host_peers_.peer(host_rank);
  const int rank = static_cast<int>(blocks_.size());
  const std::uint64_t room = peer.segment->size();
  auto* block = reinterpret_cast<CommBlock*>(peer.segment->data() + block_at);
  // Its contents were checked by rank 0: if every rank did, a new communicator would cost a page fault per
  // pair.
  if (block_at < kHeapAt || block_at > room || CommBlock::bytes(n_ranks) > room - block_at) {
    base::raise(ErrorKind::kInternal, fmt::format("the block of rank {} is outside its arena", rank),
                ErrorFamily::kBackend);
  }
  ranks_.push_back(host_rank);
  peers_.push_back(&peer);
  blocks_.push_back(block);
  single_process_ = single_process_ && peer.same_process && may_share_process();
  kernel_copies_ = kernel_copies_ && may_share_process() &&
                   peer.header->kernel_copies.load(std::memory_order_acquire) != 0;
}

// relaxed: woke_someone() only tunes how long a caller polls.
void CommMembers::ring(int rank) {
  if (local::wake(doorbell(rank))) woke_.store(true, std::memory_order_relaxed);
}

void CommMembers::ring_others() {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) ring(r);
  }
}

int CommMembers::rank_of(int host_rank) const {
  const auto found = std::ranges::find(ranks_, host_rank);
  return found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
}

// Offsets come from other ranks. Compared by subtraction, so that no sum can overflow.
std::uint8_t* CommMembers::in_arena(int rank, std::uint64_t at, std::uint64_t n_bytes) {
  const net::Segment& segment = *peer(rank).segment;
  const std::uint64_t room = segment.size();
  if (at < kHeapAt || at > room || n_bytes > room - at) return nullptr;
  return segment.data() + at;
}

Stage& CommMembers::own_stage() {
  // relaxed: this rank is the only one that stores it. The others load it with acquire, after a phase that
  // follows the store.
  const std::uint64_t at = own().stage_at.load(std::memory_order_relaxed);
  if (at != 0) return *reinterpret_cast<Stage*>(arena().base() + at);
  void* stage = arena().allocate(sizeof(Stage));
  keep_until_released(stage);
  own().stage_at.store(arena().offset_of(stage), std::memory_order_release);
  return *static_cast<Stage*>(stage);
}

Stage* CommMembers::stage(int rank) {
  return reinterpret_cast<Stage*>(
      in_arena(rank, block(rank).stage_at.load(std::memory_order_acquire), sizeof(Stage)));
}

// After its own addition no rank touches the first block any more, and the last rank stores once into each
// other block. acq_rel: the last rank's stores come after all that the others did before their additions, so
// an owner that sees all_released() may free.
void CommMembers::release() {
  const auto all = static_cast<std::uint32_t>(size());
  if (blocks_.front()->released.fetch_add(1, std::memory_order_acq_rel) + 1 != all) return;
  for (std::size_t r = 1; r < blocks_.size(); ++r) blocks_[r]->released.store(all, std::memory_order_release);
}

void CommMembers::free_kept() {
  for (void* block : kept_) arena().free(block);
  kept_.clear();
  arena().free_block(&own());
}

}  // namespace lockstep::comm::internal
