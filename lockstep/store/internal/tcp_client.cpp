#include "lockstep/store/internal/tcp_client.h"

#include <algorithm>
#include <random>
#include <thread>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::internal {

namespace {

// For the server to answer a cancellation, or to end a reply it has begun. So a wait that times out may take
// this much longer when the server is slow to confirm; without the confirmation the connection could not be
// used again.
constexpr Milliseconds kGrace{10'000};
constexpr std::size_t kRequestKept = 64 << 10;
constexpr std::size_t kReadStep = 1 << 20;
constexpr std::chrono::microseconds kClientLook{50};
// A server without room for strangers drops some: one that was dropped before the server proved itself comes
// back this often.
constexpr int kCloses = 5;

[[noreturn]] void raise_protocol(const net::Socket& socket, std::string_view what) {
  base::raise(ErrorKind::kSystem,
              base::cat("store at ", socket.peer().text(), " does not implement the store protocol: ", what),
              ErrorFamily::kNetwork);
}

[[noreturn]] void raise_unreachable(const TcpTarget& target, Milliseconds timeout, int tries,
                                    const Error& last) {
  base::raise(ErrorKind::kTimeout,
              base::cat("no store at ", net::host_and_port(target.host, target.port), " within ",
                        timeout.count(), " ms (", tries, tries == 1 ? " try" : " tries", "): ", last.what()),
              ErrorFamily::kNetwork);
}

// Longer and longer, up to a second, each between half and all of it: a thousand ranks that start together do
// not come back together.
Milliseconds pause_before_try(int tries, std::minstd_rand& random) {
  const int most = std::min(1000, 8 << std::min(tries, 10));
  return Milliseconds(std::uniform_int_distribution<int>(most / 2, most)(random));
}

}  // namespace

// Addresses are resolved again for every try: a name may begin to resolve, or change, while the master
// starts.
TcpClient TcpClient::connect(const TcpTarget& target, Milliseconds timeout, Deadline deadline) {
  std::minstd_rand random(std::random_device{}());
  // Refusals (a wrong secret) and missing memory end the attempt; a port where nobody listens yet does not.
  int closed = 0;
  std::optional<base::SlowWait> slow;
  for (int tries = 1;; ++tries) {
    try {
      return connect_to_any(net::Address::resolve(target.host, target.port), target, deadline);
    } catch (const DistNetworkError& error) {
      if (error.kind() == ErrorKind::kUsage || error.kind() == ErrorKind::kResource) throw;
      // A server that takes connections only to close them has its reasons; one that is ending gets a second
      // chance.
      if (error.kind() == ErrorKind::kPeerLost && ++closed == kCloses) {
        base::raise(
            ErrorKind::kUsage,
            base::cat(error.what(), " before it answered, ", kCloses, " times; it may ",
                      target.secret
                          ? "have no job secret, or the one of another job"
                          : "ask for a job secret (LOCKSTEP_SECRET_FILE) that this process does not have",
                      ", or be no store"),
            ErrorFamily::kNetwork);
      }
      const Milliseconds pause = pause_before_try(tries, random);
      if (deadline.remaining() <= pause) {
        if (!deadline.expired()) std::this_thread::sleep_for(deadline.remaining());
        raise_unreachable(target, timeout, tries, error);
      }
      if (base::log_enabled(LogLevel::kDebug))
        base::log(LogLevel::kDebug, base::cat("store: ", error.what(), "; trying again"));
      if (!slow) slow.emplace(deadline);
      slow->say_if_due([&] {
        return base::cat("no store answers at ", net::host_and_port(target.host, target.port), " yet (",
                         error.what(), "); this process waits for rank 0 or the launcher to open it");
      });
      std::this_thread::sleep_for(pause);
    }
  }
}

TcpClient TcpClient::connect_to_any(std::span<const net::Address> addresses, const TcpTarget& target,
                                    Deadline deadline) {
  // A server that does not answer at one address must not keep the client from the next.
  constexpr Milliseconds kShare{5'000};
  std::optional<Failure> telling;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    // At most half of what is left, at most kShare, except for the last address.
    const auto half = std::chrono::duration_cast<Milliseconds>(deadline.remaining() / 2);
    const bool last = i + 1 == addresses.size();
    const Deadline until = last ? deadline : std::min(deadline, Deadline::after(std::min(half, kShare)));
    try {
      return connect_once(addresses[i], target, until);
    } catch (const DistNetworkError& error) {
      // A refusal, or a connection that was lost, explains more than that nothing answered.
      const auto weight = [](const Failure& failure) {
        return failure.kind == ErrorKind::kUsage ? 2 : failure.kind == ErrorKind::kPeerLost ? 1 : 0;
      };
      if (!telling || weight(error.failure()) > weight(*telling)) {
        telling = error.failure();
      } else if (weight(*telling) == 0) {
        telling->message += base::cat("; ", error.what());
      }
    }
  }
  base::raise(*telling);
}

TcpClient TcpClient::connect_once(const net::Address& address, const TcpTarget& target, Deadline deadline) {
  TcpClient client(net::Socket::connect(address, deadline), target.limits);
  client.introduce(
      target, {.purpose = net::Purpose::kStoreTcp, .address = client.channel().socket().peer().canonical()},
      deadline);
  if (client.is_ours_ && target.local_socket) client.go_local(target, deadline);
  return client;
}

TcpClient::TcpClient(net::Socket socket, const TcpStoreLimits& limits)
    : writer_(std::make_unique<TcpWriter>(net::Channel(std::move(socket)))),
      limits_(limits),
      path_(base::cat(channel().socket().local().text(), " -> ", channel().socket().peer().text())) {
  if (base::available_cores() > 1) channel().socket().set_look_before_sleep(kClientLook);
}

// Only TCP is sealed: nobody stands between the two ends of a local socket, and its name is in the proofs.
void TcpClient::introduce(const TcpTarget& target, const net::Binding& binding, Deadline deadline) {
  if (target.secret) {
    const auto keys = net::handshake_as_client(channel().socket(), *target.secret, binding, deadline);
    if (binding.purpose == net::Purpose::kStoreTcp) channel().seal_as_client(keys);
  }
  try {
    validate(deadline);
  } catch (const DistNetworkError& error) {
    if (!target.secret || error.kind() != ErrorKind::kPeerLost) throw;
    // It knows the secret, so it is the store: it is ending, or strangers took this client's place before its
    // proof came. That is no verdict, however often it happens.
    base::raise(ErrorKind::kSystem, base::cat(error.what(), " when the secrets were found to agree"),
                ErrorFamily::kNetwork);
  }
}

// A local socket costs about half of what TCP over loopback does. The server tells its name over the
// connection there is; whatever goes wrong on the way, that connection is kept.
void TcpClient::go_local(const TcpTarget& target, Deadline deadline) {
  begin(Query::kLocalName).send(deadline);
  const bool has_one = read<Status>(deadline) == Status::kDone;
  const std::string name = read_text(deadline);
  if (!has_one || read_text(deadline) != base::host_identity()) return;
  try {
    TcpClient local(net::Socket::connect_local(name, deadline), target.limits);
    local.introduce(target, {.purpose = net::Purpose::kStoreLocal, .server = name}, deadline);
    local.path_ = base::cat(path_, " by local socket");
    // Ends the TCP connection, over which nothing is pending.
    *this = std::move(local);
  } catch (const Error& error) {
    base::log(LogLevel::kInfo, base::cat("store: staying with TCP: ", error.what()));
  }
}

// One round trip: torch's validation has no reply of its own, so a ping goes with it. A server of ours
// answers a ping of this form with another number than torch's, which returns it unchanged.
void TcpClient::validate(Deadline deadline) {
  const auto ping = kOurPing | (std::random_device{}() & ~kOurPingMask);
  begin(Query::kValidate).put(kValidationMagic).put(Query::kPing).put(ping).send(deadline);
  const auto answer = read<std::uint32_t>(deadline);
  is_ours_ = answer == pong(ping);
  if (!is_ours_ && answer != ping) raise_protocol(channel().socket(), "it answered the first ping wrongly");
}

TcpClient& TcpClient::begin(Query query) {
  if (request_.capacity() > kRequestKept) request_ = Bytes();
  request_.clear();
  return put(query);
}

TcpClient& TcpClient::raw_key(std::string_view key) {
  put<std::uint64_t>(key.size());
  request_.insert(request_.end(), key.begin(), key.end());
  return *this;
}

TcpClient& TcpClient::key(std::string_view key) {
  const std::size_t n_bytes = kKeyPrefix.size() + key.size();
  if (n_bytes > limits_.key_bytes) {
    base::raise(ErrorKind::kUsage,
                base::cat("a key of ", key.size(), " bytes; the limit is ", limits_.key_bytes),
                ErrorFamily::kStore);
  }
  put<std::uint64_t>(n_bytes);
  request_.insert(request_.end(), kKeyPrefix.begin(), kKeyPrefix.end());
  request_.insert(request_.end(), key.begin(), key.end());
  return *this;
}

TcpClient& TcpClient::count(std::size_t n) {
  if (n > limits_.keys_per_request) {
    base::raise(ErrorKind::kUsage, base::cat(n, " keys in one call; the limit is ", limits_.keys_per_request),
                ErrorFamily::kStore);
  }
  return put<std::uint64_t>(n);
}

TcpClient& TcpClient::keys(std::span<const std::string> keys) {
  count(keys.size());
  for (const std::string& one : keys) key(one);
  return *this;
}

TcpClient& TcpClient::value(std::span<const std::uint8_t> bytes) {
  if (bytes.size() > limits_.value_bytes) {
    base::raise(ErrorKind::kUsage,
                base::cat("a value of ", bytes.size(), " bytes; the limit is ", limits_.value_bytes),
                ErrorFamily::kStore);
  }
  put<std::uint64_t>(bytes.size());
  request_.insert(request_.end(), bytes.begin(), bytes.end());
  return *this;
}

void TcpClient::send(Deadline deadline) {
  unconfirmed_ = true;
  writer_->send(request_, deadline);
}

void TcpClient::post(Deadline deadline) {
  unconfirmed_ = true;
  writer_->post(request_, deadline);
}

// Any reply confirms every request before it: the server executes them in order.
void TcpClient::fill(std::size_t n_bytes, Deadline deadline) {
  if (buffered() >= n_bytes) return;
  std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
  end_ = buffered();
  begin_ = 0;
  while (buffered() < n_bytes) end_ += channel().read_some(std::span(buffer_).subspan(end_), deadline);
  unconfirmed_ = false;
}

// Doubles while bytes come: a length that is announced and never sent costs at most kReadStep of memory.
Bytes TcpClient::read_sized(Deadline deadline) {
  const auto n_bytes = read<std::uint64_t>(deadline);
  if (n_bytes > limits_.value_bytes)
    raise_protocol(channel().socket(), base::cat("a reply of ", n_bytes, " bytes"));
  const std::size_t ready = std::min<std::size_t>(n_bytes, buffered());
  Bytes bytes(buffer_.begin() + static_cast<std::ptrdiff_t>(begin_),
              buffer_.begin() + static_cast<std::ptrdiff_t>(begin_ + ready));
  begin_ += ready;
  while (bytes.size() < n_bytes) {
    const std::size_t have = bytes.size();
    bytes.resize(have + std::min<std::size_t>(n_bytes - have, std::max(kReadStep, have)));
    channel().read_exact(std::span(bytes).subspan(have), deadline);
  }
  return bytes;
}

std::string TcpClient::read_text(Deadline deadline) {
  return to_text(read_sized(deadline));
}

Status TcpClient::wait_for_status(Deadline deadline, const std::function<std::string()>& waiting) {
  base::SlowWait slow(deadline);
  do {
    try {
      return read<Status>(slow.next());
    } catch (const DistNetworkError& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    slow.say_if_due(waiting);
  } while (!deadline.expired());
  const Deadline grace = Deadline::after(kGrace);
  begin(Query::kCancelWait).send(grace);
  const auto status = read<Status>(grace);
  // An answer that crossed the cancellation counts; the cancellation's own comes behind it.
  cancel_pending_ = status != Status::kCanceled;
  return status;
}

// Requests without a reply (set) are known to be executed when a later one is answered.
void TcpClient::flush(Deadline deadline) {
  if (!unconfirmed_) return;
  begin(Query::kPing).put(std::uint32_t{0}).send(deadline);
  read<std::uint32_t>(deadline);
}

// The reply to a cancellation that came too late is taken off the stream before the next request.
void TcpClient::done(Deadline deadline) {
  if (!cancel_pending_) return;
  cancel_pending_ = false;
  if (read<Status>(deadline) != Status::kCanceled)
    raise_protocol(channel().socket(), "a wait was not taken back");
}

}  // namespace lockstep::internal
