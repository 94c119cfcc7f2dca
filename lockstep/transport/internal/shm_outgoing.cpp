#include "lockstep/transport/internal/shm_outgoing.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::transport::internal {
namespace {

Intro introduction(const TransportState& state, const Peer& peer) {
  return {.id = state.options.id,
          .token = state.self.token,
          .to = peer.endpoint.token,
          .heap_bytes = state.heap.mapping()->size()};
}

// The receiver closed its end, which it does after it has read the ring for the last time. events = 0:
// POLLHUP is reported without being asked for, and data that waits does not matter.
bool hung_up(int socket) {
  pollfd ask{.fd = socket, .events = 0, .revents = 0};
  return ::poll(&ask, 1, 0) == 1 && (ask.revents & POLLHUP) != 0;
}

}  // namespace

std::shared_ptr<ShmOutgoing> ShmOutgoing::connect(TransportState& state, const std::shared_ptr<Peer>& peer,
                                                  std::optional<Failure>& failure) {
  // Once: a worker listens from before its address is known until its end.
  int code = 0;
  auto socket = net::UnixSocket::try_connect(peer->endpoint.token, code);
  if (!socket && code == ECONNREFUSED) {
    failure = lost_failure(
        *peer, {.rank = peer->id, .pid = peer->endpoint.pid, .cause = "nobody listens at its address"});
    return nullptr;
  }
  if (!socket) {
    failure =
        base::system_failure(code, base::cat("connecting to worker ", peer->name), ErrorFamily::kNetwork);
    return nullptr;
  }
  if (!socket->trust_own_user()) {
    failure =
        Failure{.kind = ErrorKind::kUsage,
                .message = base::cat("worker ", peer->name,
                                     " runs as another user: shared memory is for processes of one user, "
                                     "others need TCP (bind_host) and a job secret"),
                .family = ErrorFamily::kNetwork};
    return nullptr;
  }
  auto link = std::make_shared<ShmOutgoing>(state, peer, std::move(*socket));
  link->call(*peer);
  return link;
}

// Registered last: an answer cannot be handled before the greeting exists.
void ShmOutgoing::call(const Peer& peer) {
  ++n_calls_;
  set_unsent({});
  greeting_.emplace(state_.options.secret, introduction(state_, peer),
                    net::Binding{.purpose = net::Purpose::kTransportLocal, .server = peer.endpoint.token});
  socket_.send(greeting_->first(), Deadline::now());
  watch_.add(state_, socket_.fd(), shared_from_this());
}

// As for TCP: before the welcome a connection may be dropped for want of room for strangers, and is made
// again.
bool ShmOutgoing::call_again(const Peer& peer) {
  int code = 0;
  auto socket =
      n_calls_ < kMostCalls ? net::UnixSocket::try_connect(peer.endpoint.token, code) : std::nullopt;
  if (!socket || !socket->trust_own_user()) return false;
  watch_.remove(state_);
  socket_ = std::move(*socket);
  call(peer);
  return true;
}

ShmOutgoing::ShmOutgoing(TransportState& state, const std::shared_ptr<Peer>& peer, net::UnixSocket socket)
    : state_(state), peer_(peer), socket_(std::move(socket)), holder_(std::make_shared<Holder>()) {
  holder_->process = local::PeerProcess::behind(socket_);
}

// Encoded before it is known whether the ring has room: the large parts are in the heap either way, and a
// record in the backlog is small. Order: what is in the backlog goes first.
std::optional<Failure> ShmOutgoing::send(Message message) {
  if (!encode_record(message, state_.heap, holder_, record_)) {
    return Failure{.kind = ErrorKind::kResource,
                   .message = base::cat("no shared memory for a message of ", size_of(message), " bytes"),
                   .family = ErrorFamily::kNetwork};
  }
  if (!backlog_.empty()) flush();
  if (open_ && backlog_.empty() && write(record_)) return std::nullopt;
  backlog_.push_back(std::move(record_));
  if (open_) flush();
  return std::nullopt;
}

// The record first, then the bit and the bell (Inbox::announce): who finds the bit finds the record.
bool ShmOutgoing::write(std::span<const std::uint8_t> record) {
  if (!ring_.write(record)) return false;
  inbox_.announce(slot_, bell_.get());
  return true;
}

// The second round is needed: the receiver may have made room between the failed write and want_room().
void ShmOutgoing::flush() {
  try {
    if (!unsent_.empty()) introduce();
  } catch (const Error&) {
    return;  // the socket has ended, which on_ready() is notified of and which may be followed by a reconnect
  }
  if (!open_) return;
  for (const bool asked : {false, true}) {
    while (!backlog_.empty() && write(backlog_.front())) backlog_.pop_front();
    if (backlog_.empty() || asked) return;
    ring_.want_room();
  }
}

// Every error of the socket is its end. After it this is called once more, when it is known how the process
// ended; perhaps also when the connection is over already (TransportState::call_later).
void ShmOutgoing::on_ready(std::uint32_t) noexcept {
  const auto self = shared_from_this();
  const auto peer = peer_.lock();
  if (!peer) return end(false);
  std::string over;
  {
    const base::MutexLock lock(peer->mutex);
    if (!socket_) return;
    bool ended = watch_.awaits_process();
    try {
      if (!ended) over = receive();
    } catch (const Error&) {
      ended = !called_again(*peer);
    } catch (const std::exception& error) {
      over = error.what();
    }
    if (ended) over = watch_.cause(state_, holder_->process, left_, self);
    state_.count_queue(*peer);
  }
  if (!over.empty()) state_.lose(peer, over);
}

bool ShmOutgoing::called_again(const Peer& peer) noexcept {
  try {
    return !open_ && call_again(peer);
  } catch (const std::exception&) {
    return false;  // the worker is gone
  }
}

std::string ShmOutgoing::receive() {
  std::array<std::uint8_t, net::kMaxPeerMessage> buffer;
  std::vector<base::Fd> fds;
  const std::size_t n = receive_now(socket_, buffer, fds);
  if (n == 0) return {};
  if (!open_) return greet(std::span(buffer).first(n), std::move(fds));
  // Any other byte says that the ring has room.
  if (buffer[0] == kLeave) left_ = true;
  flush();
  return {};
}

std::string ShmOutgoing::greet(std::span<const std::uint8_t> message, std::vector<base::Fd> fds) {
  auto step = greeting_->next(message);
  if (!step.refusal.empty()) return step.refusal;
  if (!step.send.empty()) {
    set_unsent(std::move(step.send));
    introduce();
  }
  if (!step.welcome) return {};
  // The slot becomes an offset and the size a mapping: checked before either is used.
  if (fds.size() != 2 || step.welcome->slot >= kSlots || step.welcome->inbox_bytes != kInboxBytes) {
    return "it sent no inbox that this version supports";
  }
  // One mapping per process and segment, however many transports of this process send there.
  inbox_ = Inbox(local::SegmentTable::of_process().map(std::move(fds[0]), kInboxBytes));
  bell_ = std::move(fds[1]);
  slot_ = step.welcome->slot;
  ring_ = RingWriter(inbox_.ring(slot_));
  open_ = true;
  flush();
  return {};
}

void ShmOutgoing::introduce() {
  try {
    socket_.send(unsent_, Deadline::now(), std::array{state_.heap.mapping()->fd()});
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return;
    throw;
  }
  set_unsent({});
}

// Counted, so that a thread in wait() sleeps only until it is time to try again. One that sleeps already is
// woken to count anew: this may be a thread that only polls, and stops.
void ShmOutgoing::set_unsent(Bytes message) noexcept {
  const bool is_new = !message.empty() && unsent_.empty();
  state_.unsent.fetch_add(int{!message.empty()} - int{!unsent_.empty()}, std::memory_order_relaxed);
  unsent_ = std::move(message);
  if (is_new) state_.idle_wait.ring();
}

// Frees the memory of records that the receiver will never read. Pre: it has hung up, so its head does not
// move any more.
void ShmOutgoing::take_back_unread() noexcept {
  const Ring ring = ring_.ring();
  RingReader reader(ring, ring.control->head.load(std::memory_order_acquire));
  Bytes record;
  while (const std::uint64_t n_bytes = reader.next(kMinRecord, kMaxRingRecord)) {
    record.resize(n_bytes);
    reader.take(record.data(), n_bytes);
    take_back_record(state_.heap, record);
  }
}

// Records in the ring are taken back only when the receiver has hung up; one that merely left may still read
// them. Blocks that it holds are swept when its process has ended (Holder::link_ended).
void ShmOutgoing::end(bool gone) noexcept {
  if (!socket_) return;
  watch_.remove(state_);
  for (const auto& record : backlog_) take_back_record(state_.heap, record);
  backlog_.clear();
  set_unsent({});
  if (gone && open_ && hung_up(socket_.fd())) take_back_unread();
  try {
    if (open_) socket_.send(std::array{kLeave}, Deadline::now());
  } catch (const Error&) {
    // It went first.
  }
  open_ = false;
  socket_ = net::UnixSocket();
  holder_->link_ended.store(true, std::memory_order_release);
}

}  // namespace lockstep::transport::internal
