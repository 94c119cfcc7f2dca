#include "engines/gloo/connections.h"

#include <fcntl.h>
#include <gloo/transport/tcp/address.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {
namespace {

// gloo waits five times this for a connection.
constexpr std::chrono::milliseconds kConnect{std::chrono::hours(24)};

// Family, port and address of a socket name, comparable.
std::string key_of(const sockaddr_storage& name) {
  if (name.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(name);
    return "4" + std::string(reinterpret_cast<const char*>(&in.sin_port), sizeof in.sin_port) +
           std::string(reinterpret_cast<const char*>(&in.sin_addr), sizeof in.sin_addr);
  }
  const auto& in = reinterpret_cast<const sockaddr_in6&>(name);
  return "6" + std::string(reinterpret_cast<const char*>(&in.sin6_port), sizeof in.sin6_port) +
         std::string(reinterpret_cast<const char*>(&in.sin6_addr), sizeof in.sin6_addr);
}

// Both names of a connected socket; empty for anything else. Both, since a port may serve again while a
// connection that was accepted on it still lives.
std::string connection_key(int fd) {
  sockaddr_storage name{}, peer{};
  socklen_t length = sizeof name, peer_length = sizeof peer;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) return "";
  if (name.ss_family != AF_INET && name.ss_family != AF_INET6) return "";
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) return "";
  return key_of(name) + key_of(peer);
}

// So that a host that vanished is noticed within some 15 s. Not TCP_USER_TIMEOUT: it would end connections to
// a process that is merely stopped.
void keep_alive(int fd) {
  const int on = 1, idle = 5, interval = 2, probes = 5;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

}  // namespace

Connections::Connections(std::shared_ptr<Device> device, int rank, int size)
    : rank_(rank), size_(size), device_(std::move(device)), sockets_(static_cast<std::size_t>(size), -1) {
  context_ = device_->gloo_device()->createContext(rank, size);
  context_->setTimeout(kConnect);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) context_->createPair(peer);
  }
}

// In this order: the shutdown ends gloo's operations in progress before the context destroys its pairs, and
// hurry() shortens the wait for the device's thread there (runtime.h).
Connections::~Connections() {
  shut_down();
  if (size_ > 1) device_->hurry();
  context_.reset();
  for (const int fd : sockets_) {
    if (fd >= 0) ::close(fd);
  }
}

// By peer: gloo listens with one address per pair, so each peer gets its own.
std::vector<std::string> Connections::addresses() const {
  std::vector<std::string> all(static_cast<std::size_t>(size_));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto bytes = context_->getPair(peer)->address().bytes();
    all[static_cast<std::size_t>(peer)].assign(bytes.begin(), bytes.end());
  }
  return all;
}

void Connections::connect(int peer, const std::string& address) {
  // gloo copies a fixed number of bytes from it.
  if (address.size() != context_->getPair(peer)->address().bytes().size())
    raise(LOCKSTEP_INTERNAL, cat("rank ", peer, " published no address for rank ", rank_));
  device_->hurry();
  context_->getPair(peer)->connect({address.begin(), address.end()});
}

sockaddr_storage Connections::local_name(int peer) const {
  return static_cast<const gloo::transport::tcp::Address&>(context_->getPair(peer)->address()).getSockaddr();
}

// gloo does not expose the descriptor of a pair. It is found among the process's own descriptors by both ends
// of its connection, which is why ranks exchange their socket names first (Hello).
void Connections::adopt_sockets(const std::vector<sockaddr_storage>& remote_names) {
  std::vector<std::string> wanted(static_cast<std::size_t>(size_));
  for (int peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (peer != rank_) wanted[p] = key_of(local_name(peer)) + key_of(remote_names[p]);
  }
  const base::MutexLock lock(mutex_);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = number_in<int>(entry.path().filename().native());
    const std::string key = connection_key(fd);
    for (std::size_t peer = 0; !key.empty() && peer < wanted.size(); ++peer) {
      if (sockets_[peer] >= 0 || wanted[peer] != key) continue;
      const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
      // Looked at again: gloo may have closed it, and another thread opened something under that number.
      if (copy >= 0 && connection_key(copy) == key) sockets_[peer] = copy;
      if (copy >= 0 && sockets_[peer] != copy) ::close(copy);
    }
  }
  for (const int fd : sockets_) {
    if (fd >= 0) keep_alive(fd);
    if (fd >= 0 && down_) ::shutdown(fd, SHUT_RDWR);
  }
}

std::unique_ptr<gloo::transport::UnboundBuffer> Connections::buffer(void* memory, std::size_t n_bytes) {
  return context_->createUnboundBuffer(memory, n_bytes);
}

int Connections::socket(int peer) const {
  const base::MutexLock lock(mutex_);
  return sockets_[static_cast<std::size_t>(peer)];
}

bool Connections::hung_up(int peer) const {
  const int fd = socket(peer);
  if (fd < 0) return true;
  pollfd entry{.fd = fd, .events = POLLRDHUP, .revents = 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// SIOCOUTQ counts bytes that the other kernel has not acknowledged.
bool Connections::flushed() const {
  const base::MutexLock lock(mutex_);
  for (const int fd : sockets_) {
    int unsent = 0;
    if (fd >= 0 && ::ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent > 0) return false;
  }
  return true;
}

// Under the mutex, so that adopt_sockets() either sees down_ or has its sockets shut down here.
void Connections::shut_down() {
  const base::MutexLock lock(mutex_);
  down_ = true;
  for (const int fd : sockets_) {
    if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
  }
}

// Each close waits for the device's thread to go around once; hurry() makes that quick.
void Connections::close_pairs() {
  if (size_ > 1) device_->hurry();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) context_->getPair(peer)->close();
  }
}

}  // namespace lockstep::gloo_plugin
