#include "lockstep/transport/internal/tcp_outgoing.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/transport/internal/frame.h"

namespace lockstep::transport::internal {
namespace {

constexpr std::size_t kPieces = 64;  // in one write
// Sealed ahead of the socket, and how long a piece may be to share a record with others.
constexpr std::size_t kWireBytes = 256 << 10;
constexpr std::size_t kTogether = 16 << 10;

// What of a queued message is still to be sent, as pieces for one system call: nothing is copied to be
// contiguous. What a queued message has sent already is skipped, then pieces are added until the list is
// full.
struct Pieces {
  std::array<iovec, kPieces> list;
  std::size_t n = 0;
  std::uint64_t skip = 0;  // of what is added next, already sent

  bool full() const { return n == kPieces; }
  void add(std::span<const std::uint8_t> bytes) {
    const std::uint64_t skipped = std::min<std::uint64_t>(skip, bytes.size());
    skip -= skipped;
    bytes = bytes.subspan(skipped);
    if (bytes.empty() || full()) return;
    list[n++] = {.iov_base = const_cast<std::uint8_t*>(bytes.data()), .iov_len = bytes.size()};
  }
};

Failure insecure(const Peer& peer) {
  return {
      .kind = ErrorKind::kUsage,
      .message = base::cat(
          "worker ", peer.name, " is at ", net::host_and_port(peer.endpoint.tcp_host, peer.endpoint.tcp_port),
          ", beyond this machine, and there is no job secret: set LOCKSTEP_SECRET_FILE (",
          JobSecret::make_file_hint("job.secret"), ") on every host, or set insecure (LOCKSTEP_INSECURE=1)"),
      .family = ErrorFamily::kNetwork};
}

}  // namespace

std::shared_ptr<TcpOutgoing> TcpOutgoing::connect(TransportState& state, const std::shared_ptr<Peer>& peer,
                                                  std::optional<Failure>& failure) {
  const auto& at = peer->endpoint;
  const auto address = at.tcp_host.empty() ? std::nullopt : net::Address::parse(at.tcp_host, at.tcp_port);
  if (!address) {
    failure = Failure{
        .kind = ErrorKind::kUsage,
        .message = base::cat("worker ", peer->name,
                             " is on another host and has no TCP address: open its transport with bind_host"),
        .family = ErrorFamily::kNetwork};
    return nullptr;
  }
  if (!address->is_loopback() && !state.options.secret && !state.options.insecure) {
    failure = insecure(*peer);
    return nullptr;
  }
  auto link = std::make_shared<TcpOutgoing>(state, peer, *address);
  if (const int code = link->call(*peer); code != 0) {
    failure = base::system_failure(
        code, base::cat("connecting to worker ", peer->name, " at ", address->text()), ErrorFamily::kNetwork);
    return nullptr;
  }
  return link;
}

TcpOutgoing::TcpOutgoing(TransportState& state, const std::shared_ptr<Peer>& peer,
                         const net::Address& address)
    : state_(state), peer_(peer), address_(address) {}

TcpOutgoing::~TcpOutgoing() {
  if (fd_) state_.count_tcp(-1);
}

// Also the second and later attempts: everything of the last connection is dropped, later_ stays. The new
// socket is registered before the old one is removed, so a failure leaves the link as it was.
int TcpOutgoing::call(const Peer& peer) {
  base::Fd fd(::socket(address_.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || (::connect(fd.get(), address_.get(), address_.length()) != 0 && errno != EINPROGRESS))
    return errno;
  // EINPROGRESS is the usual answer; the socket becomes writable when the connection is there, or has failed.
  set_tcp_options(fd.get());
  ++n_calls_;
  const std::uint64_t key = state_.reactor.add(fd.get(), EPOLLIN | EPOLLOUT, shared_from_this());
  if (fd_) {
    state_.reactor.remove(key_, fd_.get());
  } else {
    state_.count_tcp(1);
  }
  fd_ = std::move(fd);
  key_ = key;
  greeting_.emplace(state_.options.secret,
                    Intro{.id = state_.options.id, .token = state_.self.token, .to = peer.endpoint.token},
                    net::Binding{.purpose = net::Purpose::kTransportTcp,
                                 .server = peer.endpoint.token,
                                 .address = address_.canonical()});
  reader_ = {};
  sealer_.reset();
  opener_.reset();
  wire_.clear();
  wire_at_ = 0;
  queue_.clear();  // greetings: messages wait elsewhere until it is open
  queue(with_length(greeting_->first()), {});
  phase_ = Phase::kConnecting;
  ended_ = false;
  watching_room_ = true;
  return 0;
}

// A worker under many connections of strangers may drop this one before it has proven itself; it is not lost
// for that. No pause between attempts: the connection waits in the other's queue.
std::string TcpOutgoing::end_or_call_again(const Peer& peer, std::string why) {
  if (n_calls_ >= kMostCalls) return why;
  const int code = call(peer);
  return code == 0 ? std::string() : tcp_end(code);
}

void TcpOutgoing::queue(Bytes head, Message message) {
  const std::uint64_t size = head.size() + size_of(message);
  queue_.push_back({.head = std::move(head), .message = std::move(message), .size = size});
}

// Only the message at the front is ever written partly. A queue that is not empty waits for room already, and
// EPOLLOUT will come. Never blocks; a broken link returns the cause that it broke with.
std::optional<Failure> TcpOutgoing::send(Message message) {
  if (phase_ == Phase::kBroken) {
    const auto peer = peer_.lock();
    return lost_failure(*peer, {.rank = peer->id, .pid = peer->endpoint.pid, .cause = tcp_end(broken_)});
  }
  Bytes head = encode_frame_head(message);
  if (phase_ != Phase::kOpen) {
    const std::uint64_t size = head.size() + size_of(message);
    later_.push_back({.head = std::move(head), .message = std::move(message), .size = size});
    return std::nullopt;
  }
  queue(std::move(head), std::move(message));
  if (queue_.size() == 1) write();
  return std::nullopt;
}

void TcpOutgoing::flush() {
  if (phase_ == Phase::kOpen || phase_ == Phase::kGreeting) write();
}

// A system call, so only on a change.
void TcpOutgoing::watch(bool for_room) {
  if (watching_room_ == for_room) return;
  watching_room_ = for_room;
  state_.reactor.change(key_, fd_.get(), for_room ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

// Until everything is gone or the socket is full. EPOLLOUT is requested only in between: a socket with room
// would wake every wait.
void TcpOutgoing::write() {
  for (;;) {
    const bool done = sealer_ ? write_sealed() : write_clear();
    if (phase_ == Phase::kBroken || (done && queue_.empty() && wire_at_ == wire_.size())) break;
    if (!done) return watch(true);
  }
  if (phase_ != Phase::kBroken) watch(false);
}

// The thread that handles sockets sees the end and reports the loss.
void TcpOutgoing::broke(int code) {
  broken_ = code;
  phase_ = Phase::kBroken;
  ::shutdown(fd_.get(), SHUT_RDWR);
}

// One write of as many pieces as it takes. False when the socket has no room.
bool TcpOutgoing::write_clear() {
  Pieces pieces;
  for (const auto& one : queue_) {
    pieces.skip = one.sent;
    pieces.add(one.head);
    pieces.add(one.message.body.bytes);
    for (const auto& blob : one.message.blobs) {
      if (pieces.full()) break;
      pieces.add(blob.bytes);
    }
    if (pieces.full()) break;
  }
  if (pieces.n == 0) return true;
  msghdr header{};
  header.msg_iov = pieces.list.data();
  header.msg_iovlen = pieces.n;
  const ssize_t n = ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && errno == EAGAIN) return false;
  // EINTR counts as progress of no bytes: write() comes round again.
  if (n < 0 && errno != EINTR) broke(errno);
  if (n > 0) sent(static_cast<std::uint64_t>(n));
  return true;
}

bool TcpOutgoing::write_sealed() {
  if (wire_at_ == wire_.size()) seal_some();
  if (wire_.empty()) return true;
  const ssize_t n =
      ::send(fd_.get(), wire_.data() + wire_at_, wire_.size() - wire_at_, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && errno == EAGAIN) return false;
  if (n < 0 && errno != EINTR) broke(errno);
  if (n > 0) wire_at_ += static_cast<std::size_t>(n);
  return true;
}

// Seals the next part of the queue, small pieces together in one record. What is sealed is released.
// At most kWireBytes ahead: sealed bytes are a copy, while unsealed blobs are only referred to. A record per
// small piece would cost a tag and a call each, so small ones share one.
void TcpOutgoing::seal_some() {
  thread_local Bytes together;
  wire_.clear();
  wire_at_ = 0;
  together.clear();
  const auto seal_together = [&] {
    sealer_->seal(together, wire_);
    together.clear();
  };
  while (!queue_.empty() && wire_.size() + together.size() < kWireBytes) {
    Pieces pieces;
    const auto& one = queue_.front();
    pieces.skip = one.sent;
    pieces.add(one.head);
    pieces.add(one.message.body.bytes);
    for (const auto& blob : one.message.blobs) pieces.add(blob.bytes);
    std::uint64_t taken = 0;
    for (std::size_t i = 0; i < pieces.n && taken < kWireBytes; ++i) {
      const auto* from = static_cast<const std::uint8_t*>(pieces.list[i].iov_base);
      const auto part = std::span(from, std::min<std::size_t>(pieces.list[i].iov_len, kWireBytes));
      taken += part.size();
      if (together.size() + part.size() > net::kMaxRecord) seal_together();
      if (part.size() > kTogether) {
        seal_together();
        sealer_->seal(part, wire_);
      } else {
        together.insert(together.end(), part.begin(), part.end());
      }
      if (part.size() < pieces.list[i].iov_len) break;
    }
    sent(taken);
  }
  seal_together();
}

// Pops what is complete; a message's blobs are released here, at the earliest possible time.
void TcpOutgoing::sent(std::uint64_t n_bytes) {
  while (!queue_.empty()) {
    auto& front = queue_.front();
    const std::uint64_t part = std::min(n_bytes, front.size - front.sent);
    front.sent += part;
    n_bytes -= part;
    if (front.sent < front.size) return;
    queue_.pop_front();
  }
}

// lose() is called without the peer's mutex, which it takes itself. `self` keeps this object alive while the
// peer lets go of it.
void TcpOutgoing::on_ready(std::uint32_t events) noexcept {
  const auto self = shared_from_this();
  const auto peer = peer_.lock();
  if (!peer) return end(false);
  std::string over;
  {
    const base::MutexLock lock(peer->mutex);
    if (!fd_) return;
    try {
      over = advance(events);
      // After the welcome messages may have been sent: they are not sent twice. Only a connection that ended
      // before its welcome is made again: nothing but greetings was sent on it.
      const bool dropped = !welcomed_ && (ended_ || phase_ == Phase::kBroken);
      if (dropped && !over.empty()) over = end_or_call_again(*peer, over);
    } catch (const std::exception& error) {
      over = error.what();
    }
    state_.count_queue(*peer);
  }
  if (!over.empty()) state_.lose(peer, over);
}

std::string TcpOutgoing::advance(std::uint32_t events) {
  // The first event of a socket that connects is the result of connect().
  if (phase_ == Phase::kConnecting) {
    int code = 0;
    socklen_t length = sizeof code;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &code, &length);
    if (code == ECONNREFUSED) return "nobody listens at its address";
    if (code != 0) return tcp_end(code);
    phase_ = Phase::kGreeting;
  }
  if ((events & EPOLLOUT) != 0 && phase_ != Phase::kBroken) write();
  if (phase_ == Phase::kBroken) return tcp_end(broken_);
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) return {};
  if (phase_ == Phase::kGreeting) return greet();
  // The receiver sends nothing on an open connection: this is its end.
  std::uint8_t byte = 0;
  const ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  return n > 0 ? "it sent data out of turn" : tcp_end(n == 0 ? 0 : errno);
}

// Greetings one by one; what follows the introduction is sealed and is the last.
std::string TcpOutgoing::greet() {
  std::array<std::uint8_t, net::kMaxPeerMessage + 2 + net::kRecordHead + net::kRecordTag> buffer;
  // In the clear not one byte more than the greeting is read: what follows may be sealed already.
  const std::size_t wanted = opener_ ? buffer.size() : reader_.wanted();
  const ssize_t n = ::recv(fd_.get(), buffer.data(), wanted, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  if (n <= 0) {
    ended_ = n == 0 || errno == ECONNRESET;
    return n == 0 ? "it closed the connection before it was greeted" : tcp_end(errno);
  }
  auto bytes = std::span<const std::uint8_t>(buffer).first(static_cast<std::size_t>(n));
  if (opener_) {
    const auto plain = opener_->next(bytes);
    if (opener_->failed() || !bytes.empty()) return "its answer is not sealed correctly";
    if (!plain) return {};
    bytes = *plain;
  }
  const auto message = reader_.feed(bytes);
  if (reader_.broken()) return "it sent an unknown answer";
  if (!message) return {};
  auto step = greeting_->next(*message);
  if (!step.refusal.empty()) return step.refusal;
  if (!step.send.empty()) introduce(step.send);
  if (step.welcome) {
    phase_ = Phase::kOpen;
    welcomed_ = true;
    // Order is kept: queue_ holds at most greetings, which go first, and later_ is in the order of send().
    std::ranges::move(later_, std::back_inserter(queue_));
    later_.clear();
  }
  write();
  return phase_ == Phase::kBroken ? tcp_end(broken_) : std::string();
}

// With a secret, the introduction is the last message in the clear. Nothing else is queued: messages wait for
// the welcome.
void TcpOutgoing::introduce(const Bytes& greeting) {
  const auto keys = greeting_->keys();
  if (!keys) return queue(with_length(greeting), {});
  wire_ = with_length(greeting);
  wire_at_ = 0;
  sealer_.emplace(keys->client);
  opener_.emplace(keys->server);
}

void TcpOutgoing::end(bool) noexcept {
  if (!fd_) return;
  state_.reactor.remove(key_, fd_.get());
  fd_.reset();
  queue_.clear();
  later_.clear();
  wire_.clear();
  wire_at_ = 0;
  state_.count_tcp(-1);
  phase_ = Phase::kBroken;
}

}  // namespace lockstep::transport::internal
