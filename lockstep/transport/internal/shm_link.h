// What both ends of a link over shared memory have in common: its socket, which is used for little besides
// detecting the other's end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/detail/fd.h"
#include "lockstep/local/peer_process.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/transport_state.h"

namespace lockstep::transport::internal {

// The byte by which either end announces that it leaves in order.
inline constexpr std::uint8_t kLeave = 'B';

// One message and its descriptors; 0 when there is none, since another thread has read it.
std::size_t receive_now(net::UnixSocket& socket, std::span<std::uint8_t> buffer, std::vector<base::Fd>& fds);

// What the reactor watches of a link: its socket and, once that has ended, the process at its other end. The
// sockets of a dying process close before it has ended, and only then does the kernel report how. It is given
// 200 ms for that, during which no thread waits and no lock is held:
//
//   add() --> socket --cause(): empty--> process --it ends, or the time is over: on_ready(), cause()--> remove()
//                           '--left in order, or its process cannot be observed: a text--------------------^
//
// Thread safety: none, as the link that it belongs to.
class LinkWatch {
 public:
  // The handler's on_ready() is called when there is something to read, or the socket has ended. Raises as
  // Reactor::add does.
  void add(TransportState& state, int socket, std::shared_ptr<Handler> handler);
  // The socket has ended. Why, as text: how its process ended, unless it left in order. Empty when that is
  // not known yet: the handler's on_ready() is then called once more, and another call of this returns it.
  std::string cause(TransportState& state, const local::PeerProcess& process, bool left,
                    const std::shared_ptr<Handler>& handler) noexcept LOCKSTEP_REQUIRES(state.sockets_mutex);
  // cause() was empty: the socket is not to be read any more.
  bool awaits_process() const { return awaits_process_; }
  void remove(TransportState& state) noexcept;

 private:
  bool await(TransportState& state, const local::PeerProcess& process,
             const std::shared_ptr<Handler>& handler) noexcept LOCKSTEP_REQUIRES(state.sockets_mutex);

  std::uint64_t key_ = 0;  // the reactor's
  int fd_ = -1;            // the socket's, or the process's pidfd
  bool awaits_process_ = false;
};

}  // namespace lockstep::transport::internal
