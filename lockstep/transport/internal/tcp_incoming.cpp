#include "lockstep/transport/internal/tcp_incoming.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <limits>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::transport::internal {
namespace {

// Read in one go before others have their turn.
constexpr std::uint64_t kTurnBytes = 4 << 20;
constexpr std::size_t kReadBytes = 64 << 10;
// Room for several records: a sealed read is always copied, so it may as well be long.
constexpr std::size_t kSealedReadBytes = 256 << 10;

}  // namespace

std::optional<base::Fd> TcpIncoming::accept_from(net::Listener& listener) {
  base::Fd fd(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd) return fd;
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
    base::raise(base::system_failure(errno, "accept", ErrorFamily::kNetwork));
  return std::nullopt;  // none, or it left again
}

TcpIncoming::TcpIncoming(TransportState& state, base::Fd fd)
    : GreetedIncoming(state, net::Purpose::kTransportTcp, net::Address::local_of(fd.get()).canonical()),
      fd_(std::move(fd)),
      decoder_(state.options.max_message_bytes) {
  set_tcp_options(fd_.get());
}

void TcpIncoming::start() {
  state_.sockets_mutex.assume_held();  // as the acceptor's, which is the same
  key_ = state_.reactor.add(fd_.get(), EPOLLIN, shared_from_this());
  state_.add_incoming(shared_from_this(), net::quota_key_of(fd_.get()));
}

// Under sockets_mutex. `self`: over() removes the last reference that the state holds.
void TcpIncoming::on_ready(std::uint32_t) noexcept {
  const auto self = shared_from_this();
  try {
    const auto cause = peer_ ? read_frames(kTurnBytes) : read_greeting();
    if (cause) over(*cause);
  } catch (const std::exception& error) {
    over(error.what());
  }
}

std::optional<std::string> TcpIncoming::read_greeting() {
  std::array<std::uint8_t, net::kMaxPeerMessage + 2> buffer;
  // While it waits it must not send anything: only its end is of interest.
  const std::size_t wanted = waiting_ ? 1 : reader_.wanted();
  const ssize_t n = ::recv(fd_.get(), buffer.data(), wanted, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (n <= 0) return tcp_end(n == 0 ? 0 : errno);
  if (waiting_) return "it sent data before it was accepted";
  const auto message = reader_.feed(std::span(buffer).first(static_cast<std::size_t>(n)));
  if (reader_.broken()) return "no greeting";
  if (!message) return std::nullopt;
  auto step = greet(*message);
  if (!step.send.empty() && !say(step.send)) return "its connection did not accept an answer";
  if (!step.refusal.empty()) return step.refusal;
  if (!step.intro) return std::nullopt;
  if (const auto session = keys()) {
    opener_.emplace(session->client);
    sealer_.emplace(session->server);
  }
  wait_as(std::move(*step.intro));
  return std::nullopt;
}

// Greetings are far smaller than any socket's buffer.
bool TcpIncoming::say(std::span<const std::uint8_t> greeting) noexcept {
  Bytes bytes = with_length(greeting);
  if (sealer_) {
    Bytes sealed;
    sealer_->seal(bytes, sealed);
    bytes = std::move(sealed);
  }
  return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

// From the welcome on the other side sends frames, so peer_ is set first: the next event reads them.
void TcpIncoming::accept(std::shared_ptr<Peer> peer) noexcept {
  const auto self = shared_from_this();
  waiting_.reset();
  peer_ = std::move(peer);
  state_.count_tcp(1);
  counted_ = true;
  if (!say(encode_welcome({}))) over("its connection did not accept an answer");
}

void TcpIncoming::refuse(const std::string& why) noexcept {
  const auto self = shared_from_this();
  say(net::encode_refusal(why));
  over(why);
}

// After drain() the loss has been reported; a message behind it would come from a peer that does not exist
// any more.
void TcpIncoming::hand_over() {
  for (auto& message : decoder_.messages()) {
    if (!silent_) state_.deliver({.from = peer_->id, .message = std::move(message)});
  }
  decoder_.messages().clear();
}

// Nothing of a record reaches the decoder before its tag has been verified.
std::optional<std::string> TcpIncoming::read_sealed(std::uint64_t at_most) {
  // Per thread, not per connection: it holds nothing between two calls.
  thread_local std::array<std::uint8_t, kSealedReadBytes> buffer;
  for (std::uint64_t sum = 0; sum < at_most;) {
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return std::nullopt;
    if (n < 0) return tcp_end(errno);
    if (n == 0) {
      const bool whole = opener_->between_records() && decoder_.between_frames();
      return whole ? tcp_end(0) : std::string("its connection ended within a message");
    }
    sum += static_cast<std::uint64_t>(n);
    auto rest = std::span<const std::uint8_t>(buffer).first(static_cast<std::size_t>(n));
    bool good = true;
    while (good && !rest.empty()) {
      const auto plain = opener_->next(rest);
      if (opener_->failed()) return "data arrived that it did not send: it was changed or added in transit";
      if (plain) good = decoder_.feed(*plain);
    }
    hand_over();
    if (!good) return base::cat("it sent ", decoder_.error());
    if (static_cast<std::size_t>(n) < buffer.size()) return std::nullopt;
  }
  return std::nullopt;
}

// An orderly end is between two frames. An end within one is a loss of data and is reported as such, whatever
// the cause.
std::optional<std::string> TcpIncoming::read_frames(std::uint64_t at_most) {
  if (opener_) return read_sealed(at_most);
  thread_local std::array<std::uint8_t, kReadBytes> buffer;
  for (std::uint64_t sum = 0; sum < at_most;) {
    const auto direct = decoder_.direct();
    const std::span<std::uint8_t> into = direct.empty() ? std::span<std::uint8_t>(buffer) : direct;
    const ssize_t n = ::recv(fd_.get(), into.data(), into.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return std::nullopt;
    if (n < 0) return tcp_end(errno);
    if (n == 0)
      return decoder_.between_frames() ? tcp_end(0) : std::string("its connection ended within a message");
    const auto got = static_cast<std::size_t>(n);
    sum += got;
    bool good = true;
    if (direct.empty()) {
      good = decoder_.feed(into.first(got));
    } else {
      decoder_.filled(got);
    }
    hand_over();
    if (!good) return base::cat("it sent ", decoder_.error());
    // A short read has emptied the socket: asking again would cost a call.
    if (got < into.size()) return std::nullopt;
  }
  return std::nullopt;
}

// What the sender wrote before it died is still in the socket's buffer. Afterwards nothing more may be
// delivered (silent_), and the shutdown makes the socket ready, so that its end is handled in the usual way.
void TcpIncoming::drain() noexcept {
  if (silent_ || !peer_ || !fd_) return;
  try {
    read_frames(std::numeric_limits<std::uint64_t>::max());
  } catch (const std::exception&) {
    // What cannot be read is lost with its sender.
  }
  silent_ = true;
  ::shutdown(fd_.get(), SHUT_RDWR);
}

void TcpIncoming::over(const std::string& cause) noexcept {
  if (peer_) state_.lose(peer_, cause);
  end();
}

void TcpIncoming::end() noexcept {
  const auto self = shared_from_this();
  if (!fd_) return;
  state_.reactor.remove(key_, fd_.get());
  fd_.reset();
  if (counted_) state_.count_tcp(-1);
  state_.remove_incoming(this);
}

}  // namespace lockstep::transport::internal
