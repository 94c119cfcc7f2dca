#include "lockstep/host/internal/host_peers.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <optional>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/detail/host_store.h"
#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/host/internal/push.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {
namespace {

// Of the communicator that made HostPeers.
CommBlock& first_block(const Peer& peer) {
  return *reinterpret_cast<CommBlock*>(peer.segment->data() + peer.header->block_at);
}

}  // namespace

HostPeers::HostPeers(const lockstep_comm_config& config)
    : rank_(config.rank),
      identity_{.magic = kLayoutMagic, .rank = config.rank, .nonce = {}},
      arena_(
          std::make_unique<Arena>(config.name != nullptr ? config.name : "group", config.rank, config.size)),
      peers_(static_cast<std::size_t>(config.size)) {
  const std::string nonce = base::random_hex(sizeof(identity_.nonce) / 2);
  nonce.copy(identity_.nonce, sizeof(identity_.nonce));
  // The same nonce in private and in shared memory: a peer that reads both has proof that the pid it copies
  // from is the process that owns this arena (kernel_copies_work).
  nonce.copy(own().nonce, sizeof(own().nonce));
  own().identity_at = reinterpret_cast<std::uintptr_t>(&identity_);
  own().block_at = arena_->offset_of(make_comm_block(*arena_, config.rank, config.size));
}

std::unique_ptr<HostPeers> HostPeers::join(const lockstep_comm_config& config) {
  std::unique_ptr<HostPeers> host_peers(new HostPeers(config));
  const Deadline deadline = Deadline::from_monotonic_ns(config.deadline_ns);
  try {
    HostStore store(*config.host);
    // Blocks until all ranks have exchanged their segments. From here on a failure must be reported to the
    // others, which may already wait in await_all(): hence the catch.
    auto peers = local::meet(store, {.rank = config.rank,
                                     .size = config.size,
                                     .group = config.name != nullptr ? config.name : "",
                                     .version = kLayoutVersion,
                                     .own = host_peers->arena_->segment(),
                                     .attendance_at = offsetof(ArenaHeader, attendance),
                                     .deadline = deadline});
    for (int r = 0; r < host_peers->size(); ++r)
      host_peers->adopt(r, std::move(peers[static_cast<std::size_t>(r)]));
    if (config.size == 1) return host_peers;
    host_peers->check_kernel_copies();
    host_peers->await_all(deadline);
  } catch (...) {
    host_peers->say_left();
    throw;
  }
  return host_peers;
}

// Everything that was read from another rank's segment is checked here, once: the rest of the engine relies
// on magic, version, rank and the place of the first block.
void HostPeers::adopt(int rank, local::LocalPeer them) {
  auto* header = reinterpret_cast<ArenaHeader*>(them.segment->data());
  const std::uint64_t room = them.segment->size();
  if (room < kHeapAt || header->magic != kLayoutMagic || header->version != kLayoutVersion ||
      header->rank != rank || header->block_at < kHeapAt || header->block_at > room ||
      CommBlock::bytes(size()) > room - header->block_at) {
    base::raise(ErrorKind::kInternal, fmt::format("the arena of rank {} is not laid out as expected", rank),
                ErrorFamily::kBackend);
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.header = header;
  peer.segment = std::move(them.segment);
  peer.same_process = them.same_process;
  peer.process = std::move(them.process);
  // The process behind the descriptor as the kernel reports it, as a pid in this namespace. A process in an
  // unrelated pid namespace has none here: its memory cannot be accessed.
  const std::optional<std::int64_t> pid = peer.process.pid();
  peer.vouched = pid.has_value();
  peer.pid = pid.value_or(them.pid);
}

void HostPeers::check_kernel_copies() {
  bool work = !base::environment_flag(base::EnvVar::kLockstepStagedOnly);
  for (int r = 0; r < size() && work; ++r) work = peer(r).same_process || kernel_copies_work(peer(r), r);
  // One suffices: the others are processes of the same user, seen through the same /proc.
  const auto other = std::ranges::find_if(peers_, [](const Peer& each) { return !each.same_process; });
  work = work && (other == peers_.end() || calls_are_visible(*other));
  // relaxed: the addition to n_joined in await_all() publishes it.
  own().kernel_copies.store(work ? 1 : 0, std::memory_order_relaxed);
}

// Faster ranks may have joined already and wait for this one. seq_cst: before the check for sleepers.
void HostPeers::say_left() {
  const auto left =
      base::current_failure().kind == ErrorKind::kPeerLost ? CommBlock::kAfterAnother : CommBlock::kLeft;
  reinterpret_cast<CommBlock*>(arena_->base() + own().block_at)->left.store(left, std::memory_order_seq_cst);
  for (const Peer& peer : peers_) {
    if (peer.header != nullptr) local::wake(peer.header->doorbell);
  }
}

// Names the rank that was gone first: a rank that left because of another one had seen that one leave, so
// whoever sees the second and checks again sees the first.
void HostPeers::check_all_there() {
  std::optional<int> second;
  do {
    const bool again = second.has_value();
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      const auto left = first_block(peer(r)).left.load(std::memory_order_seq_cst);
      if (left == CommBlock::kAfterAnother) {
        second = r;
      } else if (left != CommBlock::kHere) {
        local::raise_gone(r, "left");
      } else if (peer(r).process.lost()) {
        local::raise_gone(r, "ended");
      }
    }
    if (again) local::raise_gone(*second, "left");
  } while (second);
}

// No rank may leave before every rank has mapped all arenas. The last one wakes the others.
void HostPeers::await_all(Deadline deadline) {
  std::atomic<std::uint32_t>& n_joined = peer(0).header->n_joined;
  const auto all = static_cast<std::uint32_t>(size());
  // seq_cst against the sleepers below: each announces itself and then loads n_joined; the last rank adds and
  // then looks for sleepers. The addition also publishes kernel_copies, read by CommMembers afterwards.
  if (n_joined.fetch_add(1, std::memory_order_seq_cst) + 1 == all) {
    for (const Peer& peer : peers_) local::wake(peer.header->doorbell);
    return;
  }
  for (;;) {
    const std::uint32_t ticket = local::announce(own().doorbell);
    const bool over = n_joined.load(std::memory_order_seq_cst) == all;
    if (!over)
      // In slices: a rank that dies before it joins rings no doorbell, so its process is checked in between.
      local::sleep(own().doorbell, ticket, std::min(deadline, Deadline::after(local::kMeetingSlice)));
    local::retract(own().doorbell);
    if (over || n_joined.load(std::memory_order_acquire) == all) return;
    check_all_there();
    if (deadline.expired())
      base::raise(ErrorKind::kTimeout, "some ranks did not finish joining the group in time",
                  ErrorFamily::kBackend);
  }
}

}  // namespace lockstep::comm::internal
