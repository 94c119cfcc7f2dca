#include "lockstep/host/internal/circle.h"

#include <fmt/core.h>

#include <algorithm>
#include <new>

#include "lockstep/base/base.h"
#include "lockstep/host/internal/doorbell.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {

Board* make_board(Arena& arena, int rank, int size) {
  auto* board = new (arena.allocate(Board::bytes(size))) Board();
  board->magic = kLayoutMagic;
  board->rank = rank;
  board->size = size;
  for (int r = 0; r < size; ++r) new (board->outboxes() + r) std::atomic<std::uint64_t>(0);
  return board;
}

Circle::Circle(Fabric& fabric) : fabric_(fabric), rank_(fabric.rank()) {
  for (int r = 0; r < fabric.size(); ++r) add(r, fabric.peer(r).station->board_at, fabric.size());
}

Circle::Circle(Fabric& fabric, std::vector<int> members, const lockstep_comm_config& config)
    : fabric_(fabric), rank_(config.rank) {
  const lockstep_host& host = *config.host;
  const auto key = [](int r) { return fmt::format("board/{}", r); };
  Board* board = make_board(fabric.arena(), config.rank, config.size);
  const std::uint64_t own_at = fabric.arena().offset_of(board);
  try {
    if (host.kv_set(host.context, key(rank_).c_str(), &own_at, sizeof(own_at)) != LOCKSTEP_OK) {
      raise(ErrorKind::kSystem, "cannot publish this rank's board in the group's store",
            ErrorFamily::kBackend);
    }
    for (int r = 0; r < config.size; ++r) {
      std::uint64_t at = own_at;
      std::size_t length = sizeof(at);
      const auto status = r == rank_ ? LOCKSTEP_OK
                                     : host.kv_get(host.context, key(r).c_str(), &at, sizeof(at), &length,
                                                   config.deadline_ns);
      if (status != LOCKSTEP_OK || length != sizeof(at)) {
        raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
              fmt::format("rank {} of group \"{}\" did not come within the time given", r,
                          config.name != nullptr ? config.name : ""),
              ErrorFamily::kBackend);
      }
      add(members[static_cast<std::size_t>(r)], at, config.size);
    }
  } catch (...) {
    // Others may have seen it by now; a page or two stay behind in the arena.
    board->left.store(1, std::memory_order_seq_cst);
    throw;
  }
}

void Circle::add(int fabric_rank, std::uint64_t board_at, int n_ranks) {
  Peer& peer = fabric_.peer(fabric_rank);
  const int rank = static_cast<int>(boards_.size());
  const std::uint64_t room = peer.segment->size();
  auto* board = reinterpret_cast<Board*>(peer.segment->data() + board_at);
  if (board_at < kHeapAt || board_at > room || Board::bytes(n_ranks) > room - board_at ||
      board->magic != kLayoutMagic || board->rank != rank) {
    raise(ErrorKind::kInternal, fmt::format("the board of rank {} is not where it said", rank),
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
  if (internal::ring(doorbell(rank))) woke_.store(true, std::memory_order_relaxed);
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

void Circle::depart() {
  for (Board* board : boards_) board->departed.fetch_add(1, std::memory_order_acq_rel);
}

void Circle::free_blocks() {
  for (void* block : blocks_) arena().free(block);
  blocks_.clear();
  arena().free(&own());
}

}  // namespace lockstep::comm::internal
