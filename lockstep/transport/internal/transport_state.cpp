#include "lockstep/transport/internal/transport_state.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::transport::internal {
namespace {

// A worker may receive a connection before its add_peer for that worker was called.
constexpr Milliseconds kPendingTimeout{30'000};
// Connections that have not proven that they belong to the job, and how long one may take while others wait.
constexpr std::size_t kMaxStrangers = 64;
constexpr Milliseconds kStrangerGrace{100};
// Every sender's heap is mapped by every receiver: 1024 of them must fit into the address space.
constexpr std::uint64_t kMaxHeapBytes = std::uint64_t{64} << 30;

std::uint64_t heap_bytes() {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  return std::min(pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)), kMaxHeapBytes);
}

Inbox make_inbox() {
  Inbox inbox(local::SegmentTable::of_process().create("lockstep-inbox", kInboxBytes));
  inbox.mapping()->commit(0, kInboxPage);
  return inbox;
}

}  // namespace

Failure lost_failure(const Peer& peer, const LostPeer& lost) {
  return {.kind = ErrorKind::kPeerLost,
          .message = base::cat("worker ", peer.name, " (", peer.id, ") is gone: ", lost.cause),
          .family = ErrorFamily::kNetwork,
          .peer = lost};
}

TransportState::TransportState(WorkerTransportOptions with, Endpoint me)
    : options(std::move(with)),
      self(std::move(me)),
      inbox(make_inbox()),
      heap(heap_bytes()),
      idle_wait(inbox, reactor.fd(), [this] { return anything_ready(); }),
      slots(inbox) {}

// seq_cst: the count grows before wake_if_asleep() checks for a sleeper, which announces itself before it
// loads the count (anything_ready).
void TransportState::deliver(Event event) {
  {
    // Counted under the lock, so that the count is never below what the queue holds.
    const base::MutexLock lock(ready_mutex_);
    ready_.push_back(std::move(event));
    n_ready_.fetch_add(1, std::memory_order_seq_cst);
  }
  idle_wait.wake_if_asleep();
}

// The count lets a poll that finds nothing do without the lock.
std::optional<Event> TransportState::next_ready() {
  if (!anything_ready()) return std::nullopt;
  const base::MutexLock lock(ready_mutex_);
  if (ready_.empty()) return std::nullopt;
  Event event = std::move(ready_.front());
  ready_.pop_front();
  n_ready_.fetch_sub(1, std::memory_order_seq_cst);
  return event;
}

std::shared_ptr<Peer> TransportState::find(WorkerId id) {
  const base::MutexLock lock(peers_mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Peer>> TransportState::peers() {
  std::vector<std::shared_ptr<Peer>> all;
  const base::MutexLock lock(peers_mutex_);
  for (const auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

// A Peer is one incarnation of a worker and never reused: threads may hold the old one, whose `lost` must
// stay true. Its mutex is released before peers_mutex_ is taken, so two threads that add the same worker may
// both come this far; the second finds `place` changed.
std::shared_ptr<Peer> TransportState::add(WorkerId id, const std::string& name, Endpoint endpoint) {
  const auto before = find(id);
  if (before) {
    const base::MutexLock lock(before->mutex);
    if (!before->lost && !before->removed) {
      base::raise(ErrorKind::kUsage, base::cat("worker ", id, " (", before->name, ") is a peer already"));
    }
    if (before->out) before->out->end(false);
    before->out = nullptr;
    count_queue(*before);
  }
  auto peer = std::make_shared<Peer>(id, name, std::move(endpoint));
  const base::MutexLock lock(peers_mutex_);
  auto& place = peers_[id];
  if (place != before) base::raise(ErrorKind::kUsage, base::cat("worker ", id, " was added twice at once"));
  place = peer;
  return peer;
}

// relaxed: the count only tells poll() whether flush_queued() is worth its locks. Under the peer's mutex, so
// `queued` and the count agree.
void TransportState::count_queue(Peer& peer) noexcept {
  const bool now = peer.out && !peer.out->idle();
  if (now == peer.queued) return;
  peer.queued = now;
  queued.fetch_add(now ? 1 : -1, std::memory_order_relaxed);
}

// Messages that arrived before are delivered first; then, once, the loss. Three steps, since drain() delivers
// without the peer's mutex; sockets_mutex keeps two losses of one peer apart.
void TransportState::lose(const std::shared_ptr<Peer>& peer, const std::string& cause) noexcept {
  {
    const base::MutexLock lock(peer->mutex);
    if (peer->lost) return;
  }
  for (const auto& connection : incoming()) {
    if (connection->peer() == peer) connection->drain();
  }
  {
    const base::MutexLock lock(peer->mutex);
    if (peer->out) peer->out->end(true);
    peer->out = nullptr;
    count_queue(*peer);
    peer->lost = LostPeer{.rank = peer->id, .pid = peer->endpoint.pid, .cause = cause};
    // The program has removed it already and expects no event of it.
    if (peer->removed) return;
  }
  deliver({.what = Event::What::kLost, .from = peer->id, .cause = cause});
}

// The token must be that of the address this worker was given: an earlier or later process with the same id
// is somebody else.
std::shared_ptr<Peer> TransportState::known(const Intro& intro) {
  auto peer = find(intro.id);
  if (!peer || peer->endpoint.token != intro.token) return nullptr;
  const base::MutexLock lock(peer->mutex);
  return peer->lost ? nullptr : peer;
}

void TransportState::add_incoming(std::shared_ptr<Incoming> connection, std::uint64_t quota_key) {
  pending_.push_back({.who = connection,
                      .quota_key = quota_key,
                      .fresh = Deadline::after(kStrangerGrace),
                      .until = Deadline::after(kPendingTimeout)});
  incoming_.push_back(std::move(connection));
  count_pending();
}

// relaxed: read by threads that then take sockets_mutex, or look again in 200 ms. A thread that sleeps since
// before the first of them is woken to do so.
void TransportState::count_pending() noexcept {
  const std::size_t n = pending_.size() + paused_.size() + later_.size();
  if (n_pending_.exchange(n, std::memory_order_relaxed) == 0 && n != 0) idle_wait.ring();
}

// Compares all with all: they are few, and nothing here may allocate.
const TransportState::PendingConnection* TransportState::next_to_drop(
    std::size_t& n_strangers) const noexcept {
  const auto is_stranger = [](const PendingConnection& connection) {
    const auto who = connection.who.lock();
    return who && who->is_stranger();
  };
  // Of the source with the most strangers the oldest, which comes first in the list: one source cannot keep
  // the others out.
  const PendingConnection* next = nullptr;
  std::ptrdiff_t most = 0;
  n_strangers = 0;
  for (const PendingConnection& connection : pending_) {
    if (!is_stranger(connection)) continue;
    ++n_strangers;
    const auto n = std::ranges::count_if(pending_, [&](const PendingConnection& one) {
      return one.quota_key == connection.quota_key && is_stranger(one);
    });
    if (n > most) next = &connection;
    most = std::max(most, n);
  }
  return next;
}

bool TransportState::has_room_for_stranger() noexcept {
  std::size_t n = 0;
  const PendingConnection* next = next_to_drop(n);
  if (n < kMaxStrangers) return true;
  // A stranger gets kStrangerGrace to prove itself before another may take its place.
  if (!next->fresh.expired()) return false;
  drop_stranger();
  return true;
}

void TransportState::drop_stranger() noexcept {
  std::size_t n = 0;
  const PendingConnection* next = next_to_drop(n);
  if (next == nullptr) return;
  if (const auto who = next->who.lock()) who->end();
}

void TransportState::pause(std::weak_ptr<Acceptor> acceptor) {
  paused_.push_back(std::move(acceptor));
  pause_over_ = Deadline::after(kStrangerGrace);
  count_pending();
}

// Exchanged first: a resumed acceptor may find no room and pause itself again.
void TransportState::resume_acceptors() noexcept {
  const auto acceptors = std::exchange(paused_, {});
  count_pending();
  for (const auto& one : acceptors) {
    if (const auto acceptor = one.lock()) acceptor->resume();
  }
}

void TransportState::remove_incoming(const Incoming* connection) noexcept {
  std::erase_if(pending_, [&](const PendingConnection& one) {
    const auto who = one.who.lock();
    return !who || who.get() == connection;
  });
  count_pending();
  std::erase_if(incoming_, [&](const auto& one) { return one.get() == connection; });
}

// A copy of the list: accept() may end the connection, which removes entries.
void TransportState::accept_pending() noexcept {
  const auto waiting = pending_;
  for (const PendingConnection& connection : waiting) {
    const auto who = connection.who.lock();
    if (!who || !who->waiting()) continue;
    auto peer = known(*who->waiting());
    if (!peer) continue;
    who->accept(std::move(peer));
    if (who->waiting()) continue;  // over, or to be accepted later
    std::erase_if(pending_, [&](const PendingConnection& one) { return one.who.lock() == who; });
  }
  count_pending();
  resume_acceptors();
}

void TransportState::call_later(std::weak_ptr<Handler> handler, Deadline when) {
  later_.push_back({.who = std::move(handler), .when = when});
  count_pending();
}

void TransportState::expire_pending() noexcept {
  // One at a time: a handler may add others.
  for (;;) {
    const auto due = std::ranges::find_if(later_, [](const LaterCall& one) { return one.when.expired(); });
    if (due == later_.end()) break;
    const auto who = due->who.lock();
    later_.erase(due);
    count_pending();
    if (who) who->on_ready(0);
  }
  const auto waiting = pending_;
  for (const PendingConnection& connection : waiting) {
    const auto who = connection.who.lock();
    if (!connection.until.expired() || !who) continue;
    // It has proven itself and waits to be known: the program has not called add_peer for it.
    const auto& intro = who->waiting();
    const std::string why =
        intro ? base::cat("worker ", intro->id, " is not known here") : std::string("it took too long");
    if (complaints.allowed()) {
      base::log(LogLevel::kWarn, base::cat("transport ", options.name, ": refused a connection: ", why,
                                           complaints.held_back()));
    }
    who->refuse(why);
  }
  if (pause_over_.expired()) resume_acceptors();
  if (std::exchange(accept_again_, false)) accept_pending();
}

void TransportState::count_tcp(int change) {
  const int now = n_tcp_.fetch_add(change, std::memory_order_relaxed) + change;
  // Only the first connection and the last change how threads wait.
  if ((now > 0) != (now - change > 0)) idle_wait.sockets_are_polled(now > 0);
}

}  // namespace lockstep::transport::internal
