#include "lockstep/transport/internal/shm_incoming.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>

#include "lockstep/base/detail/text.h"
#include "lockstep/net/address.h"

namespace lockstep::transport::internal {
namespace {

// Between the end of a process's sockets and the end of the process.
constexpr Milliseconds kDying{200};

}  // namespace

std::string local_end(const local::PeerProcess& process, bool left) {
  constexpr const char* kConnectionEnded = "its connection ended";
  if (left) return kConnectionEnded;
  return process.cause(Deadline::after(kDying)).value_or(kConnectionEnded);
}

std::size_t receive_now(net::UnixSocket& socket, std::span<std::uint8_t> buffer, std::vector<base::Fd>& fds) {
  try {
    return socket.receive(buffer, Deadline::now(), &fds);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return 0;
    throw;
  }
}

ShmIncoming::ShmIncoming(TransportState& state, net::UnixSocket socket)
    : GreetedIncoming(state, net::Purpose::kTransportLocal, {}),
      socket_(std::move(socket)),
      process_(local::PeerProcess::behind(socket_)) {}

void ShmIncoming::start() {
  state_.sockets_mutex.assume_held();  // as the acceptor's, which is the same
  state_.add_incoming(shared_from_this(), net::quota_key_of(socket_.fd()));
  key_ = state_.reactor.add(socket_.fd(), EPOLLIN, shared_from_this());
  if (!socket_.trust_own_user()) refuse("the caller runs as another user");
}

void ShmIncoming::on_ready(std::uint32_t) noexcept {
  const auto self = shared_from_this();
  try {
    receive();
  } catch (const Error&) {
    const std::string bad = slot_ ? state_.slots.broken(*slot_) : std::string();
    // Only of a peer: how its process ended may take a wait to find out; for a stranger it is not done.
    over(bad.empty() ? local_end(process_, left_ || !peer_) : base::cat("it sent ", bad));
  } catch (const std::exception& error) {
    over(error.what());
  }
}

void ShmIncoming::receive() {
  std::array<std::uint8_t, net::kMaxPeerMessage> buffer;
  std::vector<base::Fd> fds;
  const std::size_t n = receive_now(socket_, buffer, fds);
  if (n == 0) return;
  if (!peer_) return be_greeted(std::span(buffer).first(n), std::move(fds));
  if (buffer[0] == kLeave) left_ = true;
}

void ShmIncoming::be_greeted(std::span<const std::uint8_t> message, std::vector<base::Fd> fds) {
  if (waiting_) return;  // its introduction is complete; it waits for its welcome
  auto step = greet(message);
  if (!step.send.empty()) socket_.send(step.send, Deadline::now());
  if (!step.refusal.empty()) return over(step.refusal);
  if (!step.intro) return;
  if (fds.size() != 1) return refuse("an introduction without shared memory");
  heap_ = local::SegmentTable::of_process().map(std::move(fds[0]), step.intro->heap_bytes);
  wait_as(std::move(*step.intro));
}

// The welcome carries descriptors, of which the system takes only so many at a time: then the connection
// stays pending, with its slot, and is accepted later.
void ShmIncoming::accept(std::shared_ptr<Peer> peer) noexcept {
  const auto self = shared_from_this();
  try {
    const Sender sender{.heap = heap_, .max_message_bytes = state_.options.max_message_bytes};
    if (!slot_) slot_ = state_.slots.claim(peer->id, sender, socket_.fd());
    if (!slot_) return refuse(base::cat("all ", kSlots, " places for senders are taken"));
    const Bytes welcome = encode_welcome({.slot = *slot_, .inbox_bytes = kInboxBytes});
    socket_.send(welcome, Deadline::now(), std::array{state_.inbox.mapping()->fd(), state_.idle_wait.bell()});
    waiting_.reset();
    peer_ = std::move(peer);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return state_.accept_later();
    refuse(error.what());
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void ShmIncoming::refuse(const std::string& why) noexcept {
  const auto self = shared_from_this();
  try {
    socket_.send(net::encode_refusal(why), Deadline::now());
  } catch (const Error&) {
    // It is gone and cannot be notified.
  }
  over(why);
}

// Everything that the sender completed is delivered before its loss; silence() then ignores what a late
// sender still writes.
void ShmIncoming::drain() noexcept {
  if (!slot_) return;
  while (auto event = state_.slots.take(*slot_, state_.idle_wait.bell())) state_.deliver(std::move(*event));
  state_.slots.silence(*slot_);
  ::shutdown(socket_.fd(), SHUT_WR);  // notifies the sender, which may be alive
}

// The connection is over: what came is delivered, and its worker is lost.
void ShmIncoming::over(const std::string& cause) noexcept {
  const auto peer = peer_;
  if (peer) state_.lose(peer, cause);
  drain();  // of one that left in order
  end();
}

void ShmIncoming::end() noexcept {
  const auto self = shared_from_this();
  if (!socket_) return;
  state_.reactor.remove(key_, socket_.fd());
  if (slot_) {
    const std::string broken = state_.slots.broken(*slot_);
    while (state_.slots.take(*slot_, state_.idle_wait.bell()))
      continue;  // discarded: their memory is returned
    state_.slots.silence(*slot_);
    // A sender that broke the rules may continue to write there: its slot is not reused.
    if (broken.empty()) state_.slots.release(*slot_);
  }
  slot_.reset();
  try {
    if (peer_) socket_.send(std::array{kLeave}, Deadline::now());
  } catch (const Error&) {
    // It went first.
  }
  socket_ = net::UnixSocket();
  state_.remove_incoming(this);
}

}  // namespace lockstep::transport::internal
