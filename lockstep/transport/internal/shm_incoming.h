// Another worker of this host that sends to this one: its local socket, and its slot of the inbox once it is
// accepted. The socket is then used only to notify the sender of room, to announce an orderly leave, and to
// detect the other's end.
#pragma once

#include <memory>

#include "lockstep/local/peer_process.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/incoming.h"

namespace lockstep::transport::internal {

// The byte by which either end of a local socket announces that it leaves in order.
inline constexpr std::uint8_t kLeave = 'B';

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
  void over(const std::string& cause) noexcept LOCKSTEP_REQUIRES(state_.sockets_mutex);

  net::UnixSocket socket_;
  const local::PeerProcess process_;
  Mapping heap_;
  std::optional<std::uint32_t> slot_;
  bool left_ = false;  // announced that it leaves
};

using ShmAcceptor = LinkAcceptor<ShmIncoming, net::UnixListener>;

// One message and its descriptors; 0 when there is none, since another thread has read it.
std::size_t receive_now(net::UnixSocket& socket, std::span<std::uint8_t> buffer, std::vector<base::Fd>& fds);

// Why a local connection is over, as text: how its process ended, unless it left in order. Waits for at most
// 200 ms until the kernel reports it.
std::string local_end(const local::PeerProcess& process, bool left);

}  // namespace lockstep::transport::internal
