// What the links of one transport share: who its peers are, what has come, its inbox and heap, its sockets.
//
// Two kinds of lock and their order: `sockets_mutex` (held by the one thread that handles sockets), then one peer's mutex;
// queues and tables have locks of their own that nobody holds while taking another.
// Thread safety: every method; those said to need `sockets_mutex` are called by handlers and by who holds it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/net/complaints.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/internal/idle_wait.h"
#include "lockstep/transport/internal/inbox.h"
#include "lockstep/transport/internal/message_heap.h"
#include "lockstep/transport/internal/reactor.h"
#include "lockstep/transport/internal/sender_slots.h"
#include "lockstep/transport/transport.h"
#include "lockstep/transport/worker_transport.h"

namespace lockstep::transport::internal {

// How often a worker calls another that closes the connection before it has let it in: it may have made way for strangers.
inline constexpr int kMostCalls = 20;

// A connection this worker made: its messages to one peer. Under the peer's mutex, but for on_ready, which takes it.
class Outgoing : public Handler {
 public:
  virtual std::optional<Failure> send(Message message) = 0;
  // Sends what is queued while it fits.
  virtual void flush() = 0;
  virtual bool idle() const = 0;
  // No more of it. `gone`: the other side reads no more.
  virtual void end(bool gone) noexcept = 0;
};

struct Peer {
  Peer(WorkerId i, std::string n, Endpoint e) : id(i), name(std::move(n)), endpoint(std::move(e)) {}
  const WorkerId id;
  const std::string name;
  const Endpoint endpoint;
  std::mutex mutex;
  // Guarded by mutex.
  std::shared_ptr<Outgoing> out;
  std::optional<LostPeer> lost;
  bool removed = false;
  bool queued = false;  // out may have something queued: counted in TransportState::queued
};

// A connection another worker made. All under `sockets_mutex`.
class Incoming : public Handler {
 public:
  // The worker it said it is, once it has said so and until it is let in.
  virtual const std::optional<Intro>& waiting() const = 0;
  virtual void accept(std::shared_ptr<Peer> peer) noexcept = 0;
  virtual void refuse(const std::string& why) noexcept = 0;
  // Delivers what is complete, then falls silent.
  virtual void drain() noexcept = 0;
  virtual const std::shared_ptr<Peer>& peer() const = 0;
  // It has not proven yet that it belongs to the job.
  virtual bool is_stranger() const = 0;
  virtual void end() noexcept = 0;
};

// Where connections of others come in. All under `sockets_mutex`.
class Acceptor : public Handler {
 public:
  // Accepts again after TransportState::rest.
  virtual void resume() noexcept = 0;
};

class TransportState {
 public:
  TransportState(WorkerTransportOptions with, Endpoint me);

  const WorkerTransportOptions options;
  const Endpoint self;
  Reactor reactor;
  const Inbox inbox;
  MessageHeap heap;
  IdleWait idle_wait;
  SenderSlots slots;
  std::mutex sockets_mutex;
  net::Complaints complaints;  // under sockets_mutex
  std::atomic<int> queued{0};  // peers with something queued

  // Puts an event where poll() finds it.
  void deliver(Event event);
  std::optional<Event> next_ready();
  bool anything_ready() const { return n_ready_.load(std::memory_order_seq_cst) != 0; }

  std::shared_ptr<Peer> find(WorkerId id);
  std::vector<std::shared_ptr<Peer>> peers();
  // Keeps `queued` right; the peer's mutex is held.
  void count_queue(Peer& peer) noexcept;
  // Raises kUsage when there is one. A lost or removed one is replaced.
  std::shared_ptr<Peer> add(WorkerId id, const std::string& name, Endpoint endpoint);

  // Under `sockets_mutex`.
  void lose(const std::shared_ptr<Peer>& peer, const std::string& cause) noexcept;
  // Pending connections whose workers are known by now.
  void accept_pending() noexcept;
  void expire_pending() noexcept;
  // A new connection, until it is forgotten; one that is not let in within half a minute is refused. `origin` as net::origin_of.
  void add_incoming(std::shared_ptr<Incoming> connection, std::uint64_t origin);
  void remove_incoming(const Incoming* connection) noexcept;
  // Whether one more connection of nobody knows whom may be accepted. When their places are taken the oldest of the origin that
  // has most of them makes way, if it had time enough to say who it is; else the acceptor rests, and callers wait in the
  // kernel's queue: workers that call all at once are all let in. One that makes way is closed without a word, and calls
  // again if it is a worker (kMostCalls).
  bool has_room_for_stranger() noexcept;
  // One of them makes way; there may be none.
  void drop_stranger() noexcept;
  // Does not accept until a pending connection is let in, and for a tenth of a second at most.
  void pause(std::weak_ptr<Acceptor> acceptor);
  void resume_acceptors() noexcept;
  std::vector<std::shared_ptr<Incoming>> incoming() const { return incoming_; }
  // Or acceptors that rest: somebody must look after them.
  bool has_pending() const { return n_pending_.load(std::memory_order_relaxed) != 0; }
  void count_tcp(int change);
  bool has_tcp() const { return n_tcp_.load(std::memory_order_relaxed) > 0; }

 private:
  std::shared_ptr<Peer> known(const Intro& intro);

  mutable std::mutex ready_mutex_;
  std::deque<Event> ready_;  // guarded by ready_mutex_
  std::atomic<std::size_t> n_ready_{0};
  std::mutex peers_mutex_;
  std::map<WorkerId, std::shared_ptr<Peer>> peers_;  // guarded by peers_mutex_
  // Under `sockets_mutex`.
  std::vector<std::shared_ptr<Incoming>> incoming_;
  struct PendingConnection {
    std::weak_ptr<Incoming> who;
    std::uint64_t origin;
    Deadline fresh;  // may stay until then, though others wait
    Deadline until;
  };
  // Of the strangers; null when there are none.
  const PendingConnection* next_to_drop(std::size_t& n_strangers) const noexcept;
  void count_pending() noexcept;
  std::vector<PendingConnection> pending_;  // not let in yet, oldest first
  std::vector<std::weak_ptr<Acceptor>> paused_;
  Deadline pause_over_ = Deadline::now();
  std::atomic<std::size_t> n_pending_{0};
  std::atomic<int> n_tcp_{0};
};

// What a failed send to a lost peer says.
Failure lost_failure(const Peer& peer, const LostPeer& lost);

}  // namespace lockstep::transport::internal
