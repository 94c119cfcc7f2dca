#include "lockstep/transport/worker_transport.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/transport/internal/shm_incoming.h"
#include "lockstep/transport/internal/shm_outgoing.h"
#include "lockstep/transport/internal/tcp_incoming.h"
#include "lockstep/transport/internal/tcp_outgoing.h"
#include "lockstep/transport/internal/transport_state.h"

namespace lockstep::transport {
namespace {

using namespace internal;

constexpr int kBacklog = 4096;
// Of poll(): the sockets of shared-memory links are rarely ready.
constexpr std::uint32_t kPollsPerLook = 64;
constexpr Milliseconds kPendingCheck{200};

Failure failure_of(ErrorKind kind, std::string text) {
  return {.kind = kind, .message = std::move(text), .family = ErrorFamily::kNetwork};
}

// A worker that sends to itself receives a copy that it may change, as from any other.
void copy_bytes(Message& message) {
  const auto copy = [](object::Blob& blob) {
    const Buffer own(blob.bytes.size());
    if (!blob.bytes.empty()) std::memcpy(own.data(), blob.bytes.data(), blob.bytes.size());
    blob = {.owner = own.owner(), .bytes = {own.data(), blob.bytes.size()}, .yours = true};
  };
  copy(message.body);
  std::ranges::for_each(message.blobs, copy);
}

// No thread of its own. Locks, in this order: sockets_mutex (one thread at a time handles sockets), a peer's
// mutex (its link), and below those the short ones of slots, heap and ready events. Nothing is called back
// under any of them: poll() returns events.
class WorkerTransport final : public Transport {
 public:
  WorkerTransport(WorkerTransportOptions options, Endpoint self, net::UnixListener local,
                  std::optional<net::Listener> tcp)
      : state_(std::move(options), std::move(self)) {
    const auto shm = std::make_shared<ShmAcceptor>(state_, std::move(local));
    shm->start();
    if (!tcp) return;
    const auto over_tcp = std::make_shared<TcpAcceptor>(state_, std::move(*tcp));
    over_tcp->start();
  }
  ~WorkerTransport() override { close(Deadline::now()); }

  Bytes address() const override { return encode_endpoint(state_.self); }
  void add_peer(WorkerId id, const std::string& name, const Bytes& address) override;
  void remove_peer(WorkerId id) override;
  std::optional<Failure> send(WorkerId to, Message message, Deadline deadline) override;
  std::optional<Event> poll() override;
  void wait(Deadline until) override;
  void wake() noexcept override { state_.idle_wait.ring(); }
  void begin_polling() noexcept override { state_.idle_wait.begin_polling(); }
  void end_polling() noexcept override { state_.idle_wait.end_polling(); }
  void close(Deadline deadline) override;

 private:
  std::shared_ptr<Outgoing> connect(const std::shared_ptr<Peer>& peer, std::optional<Failure>& failure);
  std::optional<Failure> send_to(const std::shared_ptr<Peer>& peer, Message message);
  void look_at_sockets() noexcept;
  void flush_queued() noexcept;

  // Nothing is sent, polled or ended any more. Always true in a forked child, which owns nothing here.
  bool over() const { return closed_.load(std::memory_order_acquire) || !made_here_; }

  const base::MadeHere made_here_;
  TransportState state_;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> polls_{0};
};

// A connection of this worker may be here already, waiting to be known. If one arrives after has_pending()
// was read, the thread that handles its introduction finds the peer itself.
void WorkerTransport::add_peer(WorkerId id, const std::string& name, const Bytes& address) {
  auto endpoint = decode_endpoint(address);
  if (!endpoint)
    base::raise(ErrorKind::kUsage,
                base::cat("worker ", name, " has an address that is not one of a transport"),
                ErrorFamily::kNetwork);
  state_.add(id, name, std::move(*endpoint));
  if (!state_.has_pending()) return;
  const base::MutexLock lock(state_.sockets_mutex);
  state_.accept_pending();
}

void WorkerTransport::remove_peer(WorkerId id) {
  const auto peer = state_.find(id);
  if (!peer) return;
  // The connection stays until the other worker ends it: what is queued may be the answer that it waits for
  // before it leaves.
  const base::MutexLock lock(peer->mutex);
  peer->removed = true;
}

std::shared_ptr<Outgoing> WorkerTransport::connect(const std::shared_ptr<Peer>& peer,
                                                   std::optional<Failure>& failure) {
  // The host identity differs between network namespaces as well, where a local socket could not be reached.
  const bool near = peer->endpoint.host == state_.self.host && state_.options.route == Route::kAuto;
  try {
    if (near) {
      auto link = ShmOutgoing::connect(state_, peer, failure);
      // kUsage: it runs as another user, whom TCP may reach.
      if (link || failure->kind != ErrorKind::kUsage || peer->endpoint.tcp_host.empty()) return link;
      failure.reset();
    }
    return TcpOutgoing::connect(state_, peer, failure);
  } catch (const std::exception&) {
    failure = base::current_failure();
    return nullptr;
  }
}

// Nothing here blocks: what does not fit is queued, so the deadline is not needed.
std::optional<Failure> WorkerTransport::send(WorkerId to, Message message, Deadline) {
  if (!made_here_)
    return failure_of(ErrorKind::kUsage, "this worker's connections belong to the parent of this process");
  if (closed_.load(std::memory_order_acquire))
    return failure_of(ErrorKind::kAborted, "this worker's transport is closed");
  const std::uint64_t size = size_of(message);
  if (size > state_.options.max_message_bytes || message.blobs.size() + 1 > kMaxParts) {
    return failure_of(
        ErrorKind::kUsage,
        base::cat("a message of ", size, " bytes in ", message.blobs.size() + 1,
                  " pieces is beyond the limit of ", state_.options.max_message_bytes, " bytes"));
  }
  try {
    if (to == state_.options.id) {
      // Without a copy the receiver's changes would reach the sender's tensors.
      copy_bytes(message);
      state_.deliver({.from = to, .message = std::move(message)});
      return std::nullopt;
    }
    const auto peer = state_.find(to);
    if (!peer) return failure_of(ErrorKind::kUsage, base::cat("worker ", to, " is not known here"));
    return send_to(peer, std::move(message));
  } catch (const std::bad_alloc&) {
    return failure_of(ErrorKind::kResource, base::cat("no memory for a message of ", size, " bytes"));
  } catch (const std::exception&) {
    return base::current_failure();
  }
}

// closed_ again, now under the peer's mutex: close() ends the connections under it, so none is made after
// that.
std::optional<Failure> WorkerTransport::send_to(const std::shared_ptr<Peer>& peer, Message message) {
  const base::MutexLock lock(peer->mutex);
  if (peer->lost) return lost_failure(*peer, *peer->lost);
  if (peer->removed || closed_.load(std::memory_order_acquire)) {
    return lost_failure(*peer, {.rank = peer->id, .pid = peer->endpoint.pid, .cause = "it has left"});
  }
  if (!peer->out) {
    std::optional<Failure> failure;
    peer->out = connect(peer, failure);
    if (!peer->out) return failure;
  }
  auto failure = peer->out->send(std::move(message));
  state_.count_queue(*peer);
  return failure;
}

// Cheapest sources first: events in process memory, then the rings, one look at a bitmap. Sockets cost a
// system call: they are polled by a call that found nothing only while TCP connections carry messages,
// otherwise by every kPollsPerLook-th.
std::optional<Event> WorkerTransport::poll() {
  if (over()) return std::nullopt;
  const std::uint32_t turn = polls_.fetch_add(1, std::memory_order_relaxed);
  const bool look = turn % kPollsPerLook == 0;
  if (!look) {
    if (auto event = state_.next_ready()) return event;
    if (auto event = state_.slots.poll(state_.idle_wait.bell())) return event;
    if (!state_.has_tcp()) return std::nullopt;
  }
  look_at_sockets();
  if (state_.queued.load(std::memory_order_relaxed) > 0) flush_queued();
  if (auto event = state_.next_ready()) return event;
  return look ? state_.slots.poll(state_.idle_wait.bell()) : std::nullopt;
}

// A thread that finds another one polling the sockets has nothing to add.
void WorkerTransport::look_at_sockets() noexcept {
  if (!state_.sockets_mutex.try_lock()) return;
  const base::MutexLock lock(state_.sockets_mutex, std::adopt_lock);
  state_.reactor.poll_sockets();
  if (state_.has_pending()) state_.expire_pending();
}

void WorkerTransport::flush_queued() noexcept {
  for (const auto& peer : state_.peers()) {
    const base::MutexLock lock(peer->mutex);
    if (!peer->queued || !peer->out) continue;
    try {
      peer->out->flush();
    } catch (const std::exception&) {
      // It stays queued; its socket becomes ready when the connection breaks.
    }
    state_.count_queue(*peer);
  }
}

// Blocks for sockets_mutex, unlike poll(): the thread was woken for a socket, and the one that holds the
// mutex may have looked before.
void WorkerTransport::wait(Deadline until) {
  if (over()) return;
  if (state_.has_pending()) until = std::min(until, Deadline::after(kPendingCheck));
  const bool sockets = state_.idle_wait.sleep(until);
  if (!sockets && !state_.has_pending()) return;
  {
    const base::MutexLock lock(state_.sockets_mutex);
    state_.reactor.poll_sockets();
    state_.expire_pending();
  }
  if (state_.unsent.load(std::memory_order_relaxed) > 0) flush_queued();
}

// closed_ first: no send begins after it, except one that has passed the check and holds its peer's mutex,
// which is waited for below. Lock order: sockets_mutex, then one peer's.
void WorkerTransport::close(Deadline deadline) {
  if (closed_.exchange(true, std::memory_order_acq_rel) || !made_here_) return;
  while (state_.queued.load(std::memory_order_relaxed) > 0 && !deadline.expired()) {
    {
      const base::MutexLock lock(state_.sockets_mutex);
      state_.reactor.poll_sockets();
      state_.expire_pending();  // peers that are about to be lost: what is queued for them ends with them
    }
    flush_queued();
    // Sleeps until a socket is ready, a millisecond at most: the deadline is checked in between.
    pollfd ready{.fd = state_.reactor.fd(), .events = POLLIN, .revents = 0};
    if (state_.queued.load(std::memory_order_relaxed) > 0) ::poll(&ready, 1, 1);
  }
  const base::MutexLock lock(state_.sockets_mutex);
  for (const auto& peer : state_.peers()) {
    const base::MutexLock one(peer->mutex);
    if (peer->out) peer->out->end(false);
    peer->out = nullptr;
    state_.count_queue(*peer);
  }
  for (const auto& connection : state_.incoming()) connection->end();
  state_.reactor.clear();
  state_.idle_wait.ring();
}

// Raises for an address at which others could connect without a proof.
net::Listener listen_tcp(const WorkerTransportOptions& options) {
  const std::string host = options.bind_host.empty() ? "127.0.0.1" : options.bind_host;
  auto addresses = net::Address::resolve(host, 0);
  // "localhost" is both; IPv4 is what more programs try.
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const auto& a) { return a.family() == AF_INET; });
  if (!addresses.front().is_loopback() && !options.secret && !options.insecure) {
    base::raise(ErrorKind::kUsage,
                base::cat("a transport that listens on ", addresses.front().text(),
                          " is open to the network and has no job secret: set LOCKSTEP_SECRET_FILE (",
                          JobSecret::make_file_hint("job.secret"),
                          ") on every host, or set insecure (LOCKSTEP_INSECURE=1)"),
                ErrorFamily::kNetwork);
  }
  return net::Listener::listen(addresses.front(), kBacklog);
}

std::string literal_host(const net::Address& address) {
  std::string text = address.text();
  text.erase(text.rfind(':'));
  if (text.front() == '[') text = text.substr(1, text.size() - 2);
  return text;
}

}  // namespace

std::unique_ptr<Transport> open_worker_transport(WorkerTransportOptions options) {
  Endpoint self{.host = base::host_identity(),
                .token = base::cat("lockstep-transport-", base::random_hex(16)),
                .pid = ::getpid()};
  std::optional<net::Listener> tcp;
  if (options.route == Route::kTcp || !options.bind_host.empty()) {
    tcp = listen_tcp(options);
    self.tcp_host = literal_host(tcp->local());
    self.tcp_port = tcp->local().port();
  }
  auto local = net::UnixListener::listen(self.token);
  return std::make_unique<WorkerTransport>(std::move(options), std::move(self), std::move(local),
                                           std::move(tcp));
}

}  // namespace lockstep::transport
