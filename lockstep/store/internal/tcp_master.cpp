#include "lockstep/store/internal/tcp_master.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::internal {

namespace {

[[noreturn]] void refuse(std::string text) {
  base::raise(ErrorKind::kUsage, std::move(text), ErrorFamily::kStore);
}

// The text is the contract with Listener::listen: a failure has a kind but no errno.
bool is_taken(const DistNetworkError& error) {
  return std::string_view(error.what()).find("EADDRINUSE") != std::string_view::npos;
}

std::vector<net::Listener> one(net::Listener listener) {
  std::vector<net::Listener> all;
  all.push_back(std::move(listener));
  return all;
}

net::Listener adopt(const TcpStoreOptions& options) {
  net::Listener listener = net::Listener::adopt(base::Fd(*options.master_listen_fd));
  const std::uint16_t has = listener.local().port();
  if (options.port != 0 && has != options.port) {
    listener.release().release();  // the caller's still
    refuse(base::cat("master_listen_fd is bound to port ", has, ", not to port ", options.port));
  }
  return listener;
}

// Both loopback addresses, one port: clients try either first, and whoever held the other could answer
// them. A machine may lack one family; a port that somebody has on one of the two is an error.
std::vector<net::Listener> listen_localhost(std::uint16_t port) {
  std::vector<net::Listener> all;
  std::optional<Failure> missing;
  for (const char* ip : {"127.0.0.1", "::1"}) {
    // Port 0 is chosen for the first family and then wanted for the second.
    const std::uint16_t wanted = all.empty() ? port : all.front().local().port();
    try {
      all.push_back(net::Listener::listen(*net::Address::parse(ip, wanted), net::Listener::kBacklog));
    } catch (const DistNetworkError& error) {
      if (is_taken(error)) throw;
      missing = error.failure();
    }
  }
  if (all.empty()) base::raise(*missing);
  return all;
}

std::vector<net::Listener> listen(const std::string& host, const TcpStoreOptions& options) {
  if (options.master_listen_fd) return one(adopt(options));
  if (!net::names_loopback(host))
    return one(net::Listener::listen_everywhere(options.port, net::Listener::kBacklog));
  if (const auto literal = net::Address::parse(host, options.port))
    return one(net::Listener::listen(*literal, net::Listener::kBacklog));
  // A free port of one family may be taken in the other: then another.
  constexpr int kTries = 16;
  for (int tries = 1;; ++tries) {
    try {
      return listen_localhost(options.port);
    } catch (const DistNetworkError& error) {
      if (options.port != 0 || !is_taken(error) || tries == kTries) throw;
    }
  }
}

// Checked before the socket listens wherever the address is known: there is no moment at which others could
// connect.
void check_exposure(const net::Address& address, const TcpStoreOptions& options) {
  if (address.is_loopback() || options.secret || options.insecure) return;
  refuse(base::cat("a store that listens on ", address.text(),
                   " is open to the network and has no job secret: set LOCKSTEP_SECRET_FILE (",
                   JobSecret::make_file_hint("job.secret"),
                   ") on every host, or set insecure (LOCKSTEP_INSECURE=1)"));
}

void check_backlog(const TcpStoreOptions& options) {
  int somaxconn = 0;
  std::ifstream("/proc/sys/net/core/somaxconn") >> somaxconn;
  const int backlog = somaxconn > 0 ? std::min(net::Listener::kBacklog, somaxconn) : net::Listener::kBacklog;
  if (options.world_size.value_or(0) <= backlog) return;
  base::log(LogLevel::kWarn, base::cat("store: ", *options.world_size,
                                       " workers may connect at once, but the listen queue holds ", backlog,
                                       "; raise net.core.somaxconn"));
}

std::unique_ptr<TcpServer> start(const std::string& host, const TcpStoreOptions& options) {
  check_backlog(options);
  if (!options.master_listen_fd && !net::names_loopback(host)) {
    check_exposure(net::Address::any(AF_INET6, options.port), options);
  }
  // Checked again with the address that was really bound: a descriptor that was passed in has its own.
  auto listeners = listen(host, options);
  try {
    check_exposure(listeners.front().local(), options);
  } catch (...) {
    if (options.master_listen_fd) listeners.front().release().release();
    throw;
  }
  if (options.master_listen_fd) listeners.front().start(net::Listener::kBacklog);
  return TcpServer::start(std::move(listeners), options.limits, options.secret);
}

// Servers that masters of this process share, by port. Process-wide because that is what multi_tenant means:
// parts of a program that know nothing of each other find the same server.
struct Tenants {
  base::Mutex mutex;
  std::map<std::uint16_t, std::weak_ptr<TcpServer>> servers LOCKSTEP_GUARDED_BY(mutex);
};

std::shared_ptr<TcpServer> share(const std::string& host, const TcpStoreOptions& options) {
  // Handles may go after static objects do, so their deleters keep this alive.
  static const auto tenants = std::make_shared<Tenants>();
  std::shared_ptr<TcpServer> server;  // outlives the lock, which its deleter takes
  const base::MutexLock lock(tenants->mutex);
  if ((server = tenants->servers[options.port].lock())) {
    if (server->has_secret(options.secret)) return server;
    refuse(base::cat("the store this process shares on port ", options.port, " has another job secret"));
  }
  // The end of the last handle keeps newcomers out until the port is free again.
  server.reset(start(host, options).release(), [keep = tenants](TcpServer* last) {
    const base::MutexLock guard(keep->mutex);
    delete last;
  });
  tenants->servers[server->address().port()] = server;
  return server;
}

}  // namespace

void check_options(const TcpStoreOptions& options) {
  if (options.world_size && *options.world_size < 1)
    refuse(base::cat("world_size ", *options.world_size, " is not positive"));
  if (!options.is_master && options.port == 0)
    refuse("port 0 is for the master; a client must know the port");
  if (!options.is_master && options.master_listen_fd) refuse("master_listen_fd is for the master");
  base::checked_timeout(options.timeout, "TcpStore", ErrorFamily::kStore);
  base::checked_timeout(options.limits.validate_timeout, "TcpStore: validate_timeout", ErrorFamily::kStore);
}

std::shared_ptr<TcpServer> start_master(const std::string& host, const TcpStoreOptions& options) {
  if (options.multi_tenant) return share(host, options);
  return start(host, options);
}

// Up to a millisecond per worker, a second at most, so that they do not all connect in the same moment.
void stagger(int world_size) {
  std::random_device random;
  std::uniform_int_distribution<int> ms(1, std::min(world_size, 1000));
  std::this_thread::sleep_for(Milliseconds(ms(random)));
}

}  // namespace lockstep::internal
