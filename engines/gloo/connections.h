// The connections to every other rank over one interface: a gloo transport context with its pairs, and a
// descriptor of our own for each pair's socket. The second descriptor lets us detect that the other end hung
// up, and shut a connection down from any thread, without interfering with gloo's use of its own.
//
// Thread safety: addresses, connect and adopt_sockets by one thread, before buffer, socket and hung_up; those
// by any thread; flushed, shut_down and close_pairs by any at any time.
#pragma once

#include <gloo/transport/context.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engines/gloo/runtime.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

class Connections {
 public:
  // Listens, once per peer. Raises what gloo throws (std::exception).
  Connections(std::shared_ptr<Device> device, int rank, int size);
  // Closes all. No buffer of it may be left.
  ~Connections();
  Connections(const Connections&) = delete;

  // Where each peer is to connect to, by peer, for connect there; "" for ourselves.
  std::vector<std::string> addresses() const;
  // Blocks until the pair is connected; `address` is what `peer` has for this rank. Raises what gloo throws,
  // also when close_pairs was called.
  void connect(int peer, const std::string& address);
  // This end's socket name of the connection to `peer`.
  sockaddr_storage local_name(int peer) const;
  // After all are connected: finds each pair's socket by both its names; `remote_names` are what local_name
  // gave at the other ends. A connection that has ended already is not found: its peer hung up. After
  // shut_down they are shut down at once. Raises what the system refuses (std::exception).
  void adopt_sockets(const std::vector<sockaddr_storage>& remote_names);

  std::unique_ptr<gloo::transport::UnboundBuffer> buffer(void* memory, std::size_t n_bytes);

  // Of our own descriptors; -1 for ourselves, before adopt_sockets, and for a connection that was not found.
  int socket(int peer) const;
  // True when the peer has shut its side down, or the connection is gone.
  bool hung_up(int peer) const;
  // True when the other hosts' kernels have all that was written.
  bool flushed() const;
  // Ends every connection; gloo's blocked operations end with an exception.
  void shut_down();
  // Makes gloo forget the pairs, for connections that hold bytes nobody will read. Takes up to 10 ms per
  // pair.
  void close_pairs();

 private:
  const int rank_, size_;
  const std::shared_ptr<Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;

  mutable base::Mutex mutex_;
  std::vector<int> sockets_ LOCKSTEP_GUARDED_BY(mutex_);
  bool down_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // shut_down was called
};

}  // namespace lockstep::gloo_plugin
