#include "lockstep/host/internal/circle.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {

Board* make_board(Arena& arena, int rank, int size) {
  auto* board = new (arena.allocate_block(Board::bytes(size))) Board();
  board->magic = kLayoutMagic;
  board->rank = rank;
  board->size = size;
  board->address = reinterpret_cast<std::uintptr_t>(board);
  for (int r = 0; r < size; ++r) {
    new (board->outboxes() + r) std::atomic<std::uint64_t>(0);
    new (board->receipts() + r) std::atomic<std::uint64_t>(0);
    board->members()[r] = board->boards()[r] = 0;
  }
  return board;
}

Circle::Circle(Fabric& fabric) : fabric_(fabric), rank_(fabric.rank()) {
  for (int r = 0; r < fabric.size(); ++r) add(r, fabric.peer(r).station->board_at, fabric.size());
}

Circle::Circle(Fabric& fabric, int rank, std::span<const int> members, std::span<const std::uint64_t> boards)
    : fabric_(fabric), rank_(rank) {
  const int size = static_cast<int>(members.size());
  for (std::size_t r = 0; r < members.size(); ++r) add(members[r], boards[r], size);
}

void Circle::add(int fabric_rank, std::uint64_t board_at, int n_ranks) {
  Peer& peer = fabric_.peer(fabric_rank);
  const int rank = static_cast<int>(boards_.size());
  const std::uint64_t room = peer.segment->size();
  auto* board = reinterpret_cast<Board*>(peer.segment->data() + board_at);
  // Its contents were looked at by rank 0: if every rank did, a new communicator would cost a page fault per pair.
  if (board_at < kHeapAt || board_at > room || Board::bytes(n_ranks) > room - board_at) {
    base::raise(ErrorKind::kInternal, fmt::format("the board of rank {} is not where it said", rank),
                ErrorFamily::kBackend);
  }
  members_.push_back(fabric_rank);
  peers_.push_back(&peer);
  boards_.push_back(board);
  single_process_ = single_process_ && peer.same_process && may_share_process();
  kernel_copies_ = kernel_copies_ && may_share_process() &&
                   peer.station->kernel_copies.load(std::memory_order_acquire) != 0;
}

void Circle::ring(int rank) {
  if (local::wake(doorbell(rank))) woke_.store(true, std::memory_order_relaxed);
}

void Circle::ring_others() {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) ring(r);
  }
}

int Circle::rank_of(int fabric_rank) const {
  const auto found = std::ranges::find(members_, fabric_rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

std::uint8_t* Circle::in_arena(int rank, std::uint64_t at, std::uint64_t n_bytes) {
  const net::Segment& segment = *peer(rank).segment;
  const std::uint64_t room = segment.size();
  if (at < kHeapAt || at > room || n_bytes > room - at) return nullptr;
  return segment.data() + at;
}

Stage& Circle::own_stage() {
  const std::uint64_t at = own().stage_at.load(std::memory_order_relaxed);
  if (at != 0) return *reinterpret_cast<Stage*>(arena().base() + at);
  void* stage = arena().allocate(sizeof(Stage));
  keep_until_departed(stage);
  own().stage_at.store(arena().offset_of(stage), std::memory_order_release);
  return *static_cast<Stage*>(stage);
}

Stage* Circle::stage(int rank) {
  return reinterpret_cast<Stage*>(
      in_arena(rank, board(rank).stage_at.load(std::memory_order_acquire), sizeof(Stage)));
}

// After its own count no rank touches the first board any more, and the last one touches each other board once.
void Circle::depart() {
  const auto all = static_cast<std::uint32_t>(size());
  if (boards_.front()->departed.fetch_add(1, std::memory_order_acq_rel) + 1 != all) return;
  for (std::size_t r = 1; r < boards_.size(); ++r) boards_[r]->departed.store(all, std::memory_order_release);
}

void Circle::free_blocks() {
  for (void* block : blocks_) arena().free(block);
  blocks_.clear();
  arena().free_block(&own());
}

}  // namespace lockstep::comm::internal
