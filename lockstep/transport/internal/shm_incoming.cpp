#include "lockstep/transport/internal/shm_incoming.h"

#include <sys/socket.h>

#include <array>

#include "lockstep/base/detail/text.h"
#include "lockstep/net/address.h"

namespace lockstep::transport::internal {

ShmIncoming::ShmIncoming(TransportState& state, net::UnixSocket socket)
    : GreetedIncoming(state, net::Purpose::kTransportLocal, {}),
      socket_(std::move(socket)),
      process_(local::PeerProcess::behind(socket_)) {}

void ShmIncoming::start() {
  state_.sockets_mutex.assume_held();  // as the acceptor's, which is the same
  state_.add_incoming(shared_from_this(), net::quota_key_of(socket_.fd()));
  watch_.add(state_, socket_.fd(), shared_from_this());
  if (!socket_.trust_own_user()) refuse("the caller runs as another user");
}

// After the end of the socket it is called once more, when it is known how the process ended; perhaps also
// when the connection is over already (TransportState::call_later).
void ShmIncoming::on_ready(std::uint32_t) noexcept {
  const auto self = shared_from_this();
  if (!socket_) return;
  if (watch_.awaits_process()) return ended();
  try {
    receive();
  } catch (const Error&) {
    ended();
  } catch (const std::exception& error) {
    over(error.what());
  }
}

// How the process ended is found out of a peer only: a stranger is not worth the time.
void ShmIncoming::ended() noexcept {
  const std::string bad = slot_ ? state_.slots.broken(*slot_) : std::string();
  const std::string cause = bad.empty() ? watch_.cause(state_, process_, left_ || !peer_, shared_from_this())
                                        : base::cat("it sent ", bad);
  if (!cause.empty()) over(cause);
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
  watch_.remove(state_);
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
