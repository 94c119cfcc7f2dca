// What the links of one transport share: its peers, the events that have arrived, its inbox and heap, its
// sockets.
//
// Lock order: `sockets_mutex` (held by the one thread that handles sockets), then one peer's mutex, then the
// lock of a queue or table (ready_mutex_, peers_mutex_, a slot's, the heap's, the reactor's), under which
// none of these is taken. Handlers are called with sockets_mutex held and take the peer's mutex themselves.
//
// An incoming connection:
//
//   accepted --proof--> waits for its worker to be known --accept()--> open --ended, broken or drained--> over
//      |  (a stranger)        |  (pending for half a minute at most)
//      '--too many, refused---'--> refused or closed
//
// Thread safety: every method; those that require sockets_mutex are called by handlers and by threads that
// hold it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
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

// How often a worker connects to another that closes the connection before it has accepted it: it may have
// been dropped in favour of a stranger.
inline constexpr int kMostCalls = 20;

// A connection that this worker made: its messages to one peer. Called under the peer's mutex, except for
// on_ready, which takes it.
class Outgoing : public Handler {
 public:
  virtual std::optional<Failure> send(Message message) = 0;
  // Sends what is queued while it fits.
  virtual void flush() = 0;
  virtual bool idle() const = 0;
  // Ends the connection. `gone`: the other side does not read any more.
  virtual void end(bool gone) noexcept = 0;
};

struct Peer {
  Peer(WorkerId i, std::string n, Endpoint e) : id(i), name(std::move(n)), endpoint(std::move(e)) {}
  const WorkerId id;
  const std::string name;
  const Endpoint endpoint;
  base::Mutex mutex;
  std::shared_ptr<Outgoing> out LOCKSTEP_GUARDED_BY(mutex);
  std::optional<LostPeer> lost LOCKSTEP_GUARDED_BY(mutex);
  bool removed LOCKSTEP_GUARDED_BY(mutex) = false;
  // out may have something queued: counted in TransportState::queued.
  bool queued LOCKSTEP_GUARDED_BY(mutex) = false;
};

// A connection that another worker made. All under `sockets_mutex`.
class Incoming : public Handler {
 public:
  // The worker it claims to be, from its introduction until it is accepted.
  virtual const std::optional<Intro>& waiting() const = 0;
  // waiting() is empty afterwards, unless it has to be accepted again later.
  virtual void accept(std::shared_ptr<Peer> peer) noexcept = 0;
  virtual void refuse(const std::string& why) noexcept = 0;
  // Delivers what is complete; nothing is delivered afterwards.
  virtual void drain() noexcept = 0;
  virtual const std::shared_ptr<Peer>& peer() const = 0;
  // It has not yet proven that it belongs to the job.
  virtual bool is_stranger() const = 0;
  virtual void end() noexcept = 0;
};

// Accepts the connections of others. All under `sockets_mutex`.
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
  base::Mutex sockets_mutex;
  net::Complaints complaints LOCKSTEP_GUARDED_BY(sockets_mutex);
  std::atomic<int> queued{0};  // peers with something queued
  std::atomic<int> unsent{0};  // of them: whose introduction has to be sent again

  // Queues an event for poll(), and wakes a sleeper.
  void deliver(Event event);
  std::optional<Event> next_ready();
  bool anything_ready() const { return n_ready_.load(std::memory_order_seq_cst) != 0; }

  std::shared_ptr<Peer> find(WorkerId id);
  std::vector<std::shared_ptr<Peer>> peers();
  // Updates `queued`.
  void count_queue(Peer& peer) noexcept LOCKSTEP_REQUIRES(peer.mutex);
  // Raises kUsage when it exists. A lost or removed peer is replaced.
  std::shared_ptr<Peer> add(WorkerId id, const std::string& name, Endpoint endpoint);

  void lose(const std::shared_ptr<Peer>& peer, const std::string& cause) noexcept
      LOCKSTEP_REQUIRES(sockets_mutex);
  // Accepts the pending connections whose workers are known by now.
  void accept_pending() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // Calls accept_pending() at the next expire_pending().
  void accept_later() noexcept LOCKSTEP_REQUIRES(sockets_mutex) { accept_again_ = true; }
  // Ends or does what was to wait until now.
  void expire_pending() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // expire_pending() calls the handler's on_ready(0) at that time, or later, unless it is gone by then.
  void call_later(std::weak_ptr<Handler> handler, Deadline when) LOCKSTEP_REQUIRES(sockets_mutex);
  // Tracks a new connection until it is removed; one that is not accepted within half a minute is refused.
  // `quota_key`: from net::quota_key_of.
  void add_incoming(std::shared_ptr<Incoming> connection, std::uint64_t quota_key)
      LOCKSTEP_REQUIRES(sockets_mutex);
  void remove_incoming(const Incoming* connection) noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // Whether one more connection that has proven nothing may be accepted. When there are too many, the oldest
  // of the quota_key that has most of them is dropped, if it had enough time for its proof; otherwise the
  // acceptor pauses, and callers wait in the kernel's queue: workers that connect all at once are all
  // accepted. A dropped connection is closed without an answer; a worker connects again (kMostCalls).
  bool has_room_for_stranger() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // Drops one of them; there may be none.
  void drop_stranger() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // Stops accepting until a pending connection is accepted, and for a tenth of a second at most.
  void pause(std::weak_ptr<Acceptor> acceptor) LOCKSTEP_REQUIRES(sockets_mutex);
  void resume_acceptors() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  std::vector<std::shared_ptr<Incoming>> incoming() const LOCKSTEP_REQUIRES(sockets_mutex) {
    return incoming_;
  }
  // Or paused acceptors, calls for later, unsent introductions: wait() must return in time for them.
  bool has_pending() const {
    return n_pending_.load(std::memory_order_relaxed) != 0 || unsent.load(std::memory_order_relaxed) != 0;
  }
  void count_tcp(int change);
  bool has_tcp() const { return n_tcp_.load(std::memory_order_relaxed) > 0; }

 private:
  std::shared_ptr<Peer> known(const Intro& intro);

  mutable base::Mutex ready_mutex_;
  std::deque<Event> ready_ LOCKSTEP_GUARDED_BY(ready_mutex_);
  std::atomic<std::size_t> n_ready_{0};
  base::Mutex peers_mutex_;
  std::map<WorkerId, std::shared_ptr<Peer>> peers_ LOCKSTEP_GUARDED_BY(peers_mutex_);
  std::vector<std::shared_ptr<Incoming>> incoming_ LOCKSTEP_GUARDED_BY(sockets_mutex);
  struct PendingConnection {
    std::weak_ptr<Incoming> who;
    std::uint64_t quota_key;
    Deadline fresh;  // not dropped before, though others wait
    Deadline until;
  };
  // Of the strangers; null when there are none.
  const PendingConnection* next_to_drop(std::size_t& n_strangers) const noexcept
      LOCKSTEP_REQUIRES(sockets_mutex);
  void count_pending() noexcept LOCKSTEP_REQUIRES(sockets_mutex);
  // Not accepted yet, oldest first.
  std::vector<PendingConnection> pending_ LOCKSTEP_GUARDED_BY(sockets_mutex);
  std::vector<std::weak_ptr<Acceptor>> paused_ LOCKSTEP_GUARDED_BY(sockets_mutex);
  struct LaterCall {
    std::weak_ptr<Handler> who;
    Deadline when;
  };
  std::vector<LaterCall> later_ LOCKSTEP_GUARDED_BY(sockets_mutex);
  Deadline pause_over_ LOCKSTEP_GUARDED_BY(sockets_mutex) = Deadline::now();
  bool accept_again_ LOCKSTEP_GUARDED_BY(sockets_mutex) = false;
  std::atomic<std::size_t> n_pending_{0};
  std::atomic<int> n_tcp_{0};
};

// The failure of a send to a lost peer.
Failure lost_failure(const Peer& peer, const LostPeer& lost);

}  // namespace lockstep::transport::internal
