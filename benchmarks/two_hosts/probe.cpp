// What the link between two hosts allows: each rank has a lane of a few TCP connections to its partner on the
// other host, sends its bytes over them and receives as many at the same time. kind=exchange only. Nothing is
// computed.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <vector>

#include "benchmarks/collective/buffers.h"
#include "benchmarks/collective/measure.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/place_rank.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_array.h"

namespace bench {
namespace {

constexpr int kStreams = 4;  // per lane

[[noreturn]] void fail(const char* what) {
  throw std::runtime_error(std::string("no ") + what);
}

sockaddr_in address_of(const std::string& host, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) fail("address");
  return address;
}

sockaddr* plain(sockaddr_in& address) {
  return reinterpret_cast<sockaddr*>(&address);
}

// What is left to do on one side of one stream.
struct Piece {
  char* at = nullptr;
  std::size_t n_bytes = 0;

  // After a send or recv that returned `n`.
  void moved(ssize_t n) {
    if (n == 0 || (n < 0 && errno != EAGAIN)) fail("connection any more");
    if (n < 0) return;
    at += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
};

struct Stream {
  int socket = -1;
  Piece out;
  Piece in;

  // Moves what can be moved now; false when nothing is left.
  bool step() {
    if (out.n_bytes != 0) out.moved(::send(socket, out.at, out.n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT));
    if (in.n_bytes != 0) in.moved(::recv(socket, in.at, in.n_bytes, MSG_DONTWAIT));
    return out.n_bytes != 0 || in.n_bytes != 0;
  }
};

class Probe {
 public:
  // The lower half of the ranks listen on `address`, the others connect to it. `ports` is shared by the
  // ranks.
  Probe(Link& link, const std::string& address, SharedArray<std::uint16_t>& ports) : link_(link) {
    const auto lanes = static_cast<std::size_t>(link.size() / 2);
    const auto rank = static_cast<std::size_t>(link.rank());
    const int listener = rank < lanes ? listen_on(address, ports[rank]) : -1;
    link.all(true);
    link.share("listening");
    for (int k = 0; k < kStreams; ++k) {
      const int socket =
          listener >= 0 ? ::accept(listener, nullptr, nullptr) : connect_to(address, ports[rank - lanes]);
      const int on = 1;
      if (socket < 0 || ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0)
        fail("connection");
      streams_.push_back({.socket = socket});
    }
    if (listener >= 0) ::close(listener);
  }
  ~Probe() {
    for (const Stream& stream : streams_) ::close(stream.socket);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  bool prepare(const Case& which) {
    if (which.kind != Kind::kExchange) refuse(which);
    return buffers_.prepare(which, &Buffers::ordinary);
  }
  std::span<float> send(std::size_t i) { return buffers_.send(i); }
  std::span<float> recv(std::size_t i) { return buffers_.recv(i); }
  void barrier() { link_.all(true); }

  void run(std::size_t i) {
    for (std::size_t k = 0; k < kStreams; ++k) {
      streams_[k].out = piece(send(i), k);
      streams_[k].in = piece(recv(i), k);
    }
    for (;;) {
      std::vector<pollfd> waiting;
      for (Stream& stream : streams_) {
        if (!stream.step()) continue;
        const int events = (stream.out.n_bytes != 0 ? POLLOUT : 0) | (stream.in.n_bytes != 0 ? POLLIN : 0);
        waiting.push_back({.fd = stream.socket, .events = static_cast<short>(events), .revents = 0});
      }
      if (waiting.empty()) return;
      ::poll(waiting.data(), waiting.size(), -1);
    }
  }

 private:
  static int listen_on(const std::string& host, std::uint16_t& port) {
    sockaddr_in address = address_of(host, 0);
    socklen_t length = sizeof(address);
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || ::bind(listener, plain(address), length) != 0 || ::listen(listener, kStreams) != 0 ||
        ::getsockname(listener, plain(address), &length) != 0) {
      fail("listener");
    }
    port = ntohs(address.sin_port);
    return listener;
  }

  static int connect_to(const std::string& host, std::uint16_t port) {
    sockaddr_in address = address_of(host, port);
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket < 0 || ::connect(socket, plain(address), sizeof(address)) != 0) fail("connection");
    return socket;
  }

  // The k-th of kStreams parts.
  static Piece piece(std::span<float> buffer, std::size_t k) {
    const auto bytes = std::as_writable_bytes(buffer);
    const std::size_t from = bytes.size() * k / kStreams;
    return {reinterpret_cast<char*>(bytes.data()) + from, bytes.size() * (k + 1) / kStreams - from};
  }

  Link& link_;
  std::vector<Stream> streams_;
  Buffers buffers_;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const bench::Request arguments = bench::arguments(argc, argv);
  const auto n_ranks = static_cast<int>(arguments.number("ranks"));
  bench::SharedArray<std::uint16_t> ports(static_cast<std::size_t>(n_ranks));
  const auto link = bench::fork_ranks(n_ranks);
  return bench::guarded(*link, [&] {
    bench::place_rank(arguments, *link);
    bench::Probe probe(*link, arguments.text("address"), ports);
    return bench::serve(*link,
                        [&](const bench::Request& request) { return bench::measure(probe, *link, request); });
  });
}
