// The ranks of one host as the engine sees them, shared by all communicators among them: they meet
// (local/meeting.h) in the key-value space of the first communicator. After join() every rank has mapped all
// arenas.
//
// Thread safety: constant after join(), except for the shared memory itself.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/arena.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/local/meeting.h"
#include "lockstep/local/peer_process.h"

namespace lockstep::comm::internal {

// One rank as seen from here; also for this rank itself.
struct Peer {
  local::Mapping segment;
  ArenaHeader* header = nullptr;
  std::int64_t pid =
      -1;  // in this process's pid namespace when vouched for, else in its own: for messages only
  bool vouched = false;  // the kernel reported the pid, not the peer
  bool same_process = false;
  local::PeerProcess process;  // empty for ranks of this one
};

class HostPeers {
 public:
  // Blocks until all ranks have joined or the deadline passes. Raises kTimeout naming who is missing,
  // kUnsupported naming a rank on another host, kResource.
  static std::unique_ptr<HostPeers> join(const lockstep_comm_config& config);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  Arena& arena() { return *arena_; }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  ArenaHeader& own() { return arena_->header(); }
  // Joining failed on this rank after all: those that have joined are notified that it left. Inside a catch
  // block.
  void say_left();

 private:
  explicit HostPeers(const lockstep_comm_config& config);
  // Raises kInternal when its arena is not laid out as this version does.
  void adopt(int rank, local::LocalPeer them);
  void check_kernel_copies();
  void await_all(Deadline deadline);
  // Raises kPeerLost when a rank left or ended before all had joined.
  void check_all_there();

  const int rank_;
  Identity identity_;  // others read it through the kernel
  std::unique_ptr<Arena> arena_;
  std::vector<Peer> peers_;
};

}  // namespace lockstep::comm::internal
