// The server of a TcpStore: one thread with a libuv loop that owns all connections and all data. Replies to
// all requests of one read leave in one write, straight from the read callback.
//
// Thread safety: every method may be called from any thread but the loop's. Ownership: ends, and closes its
// connections, when destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/secret.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {

class TcpServer {
 public:
  // Serves all `listeners`, which have one port. Raises DistNetworkError when the loop cannot be set up.
  static std::unique_ptr<TcpServer> start(std::vector<net::Listener> listeners, const TcpStoreLimits& limits,
                                          const std::optional<JobSecret>& secret);
  ~TcpServer();

  // Of the first listener.
  const net::Address& address() const;
  bool has_secret(const std::optional<JobSecret>& secret) const;
  // Waits until `n` users have joined or the deadline; returns how many have. The loop notifies.
  std::int64_t wait_joined(std::int64_t n, Deadline deadline);

 private:
  class Loop;
  explicit TcpServer(std::unique_ptr<Loop> loop);
  const std::unique_ptr<Loop> loop_;
};

}  // namespace lockstep::internal
