// Another worker of this host that sends to this one: its local socket, and its slot of the inbox once it is
// accepted. The socket is then used only to notify the sender of room, to announce an orderly leave, and to
// detect the other's end.
#pragma once

#include <memory>

#include "lockstep/local/peer_process.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/incoming.h"
#include "lockstep/transport/internal/shm_link.h"

namespace lockstep::transport::internal {

class ShmIncoming final : public GreetedIncoming, public std::enable_shared_from_this<ShmIncoming> {
 public:
  static std::optional<net::UnixSocket> accept_from(net::UnixListener& listener) {
    return listener.try_accept();
  }
  ShmIncoming(TransportState& state, net::UnixSocket socket);
  // Called by the acceptor.
  void start();

  void on_ready(std::uint32_t events) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void accept(std::shared_ptr<Peer> peer) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void refuse(const std::string& why) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void drain() noexcept override;
  void end() noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);

 private:
  void receive() LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void be_greeted(std::span<const std::uint8_t> message, std::vector<base::Fd> fds)
      LOCKSTEP_REQUIRES(state_.sockets_mutex);
  // The socket has ended.
  void ended() noexcept LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void over(const std::string& cause) noexcept LOCKSTEP_REQUIRES(state_.sockets_mutex);

  net::UnixSocket socket_;
  LinkWatch watch_;
  const local::PeerProcess process_;
  Mapping heap_;
  std::optional<std::uint32_t> slot_;
  bool left_ = false;  // announced that it leaves
};

using ShmAcceptor = LinkAcceptor<ShmIncoming, net::UnixListener>;

}  // namespace lockstep::transport::internal
