// How ranks on one host meet, once for all communicators among them: every rank publishes its identity in the
// key-value space of the first communicator, hands its arena to the others over an abstract local socket (peer credentials and a nonce from the store are checked), or
// through a table of this process when they are threads of it. After join() all arenas are mapped by all.
//
// Thread safety: constant after join(), but for the shared memory itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/arena.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::comm::internal {

// One rank as seen from here; also for this rank itself.
struct Peer {
  std::shared_ptr<net::Segment> segment;
  Station* station = nullptr;
  std::int64_t pid =
      -1;  // in this process's pid namespace when vouched for, else in its own: for messages only
  bool vouched = false;  // the pid is the kernel's word, not the peer's
  bool same_process = false;
  net::UnixSocket socket;  // open while the peer's process lives; empty for ranks of this process
  Fd pidfd;                // readable once it has ended; empty where the kernel does not let us see it
};

class Fabric {
 public:
  // Blocks until all ranks have joined or the deadline passes. Raises kTimeout naming who is missing, kUnsupported
  // naming a rank on another host, kResource.
  static std::unique_ptr<Fabric> join(const lockstep_comm_config& config);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  Arena& arena() { return *arena_; }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  Station& own() { return arena_->station(); }
  // Joining failed here after all: those that have joined hear that this rank left.
  void say_left();

 private:
  struct Card;  // what a rank publishes about itself
  Fabric(const lockstep_comm_config& config);
  void meet(const lockstep_comm_config& config, Deadline deadline);
  Card card_of(const lockstep_comm_config& config, int rank, Deadline deadline);
  void exchange(net::UnixSocket& socket, int rank, const Card& theirs, Deadline deadline);
  void accept_one(net::UnixListener& listener, std::vector<Card>& cards, Deadline deadline);
  void await_all(Deadline deadline);
  void adopt(int rank, const Card& card, std::shared_ptr<net::Segment> segment, net::UnixSocket socket);

  const int rank_;
  const std::string nonce_;
  Identity identity_;  // others read it through the kernel
  std::unique_ptr<Arena> arena_;
  std::vector<Peer> peers_;
};

}  // namespace lockstep::comm::internal
