// A worker that sends to this one over TCP: greetings first, then frames until the connection ends.
#pragma once

#include <memory>

#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"
#include "lockstep/transport/internal/frame.h"
#include "lockstep/transport/internal/incoming.h"
#include "lockstep/transport/internal/tcp_link.h"

namespace lockstep::transport::internal {

class TcpIncoming final : public GreetedIncoming, public std::enable_shared_from_this<TcpIncoming> {
 public:
  static std::optional<base::Fd> accept_from(net::Listener& listener);
  TcpIncoming(TransportState& state, base::Fd fd);
  // Called by the acceptor.
  void start();

  void on_ready(std::uint32_t events) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void accept(std::shared_ptr<Peer> peer) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void refuse(const std::string& why) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  void drain() noexcept override;
  void end() noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);

 private:
  // Why the connection is over; nothing when it is not.
  std::optional<std::string> read_greeting() LOCKSTEP_REQUIRES(state_.sockets_mutex);
  std::optional<std::string> read_frames(std::uint64_t at_most);
  std::optional<std::string> read_sealed(std::uint64_t at_most);
  void hand_over();
  bool say(std::span<const std::uint8_t> greeting) noexcept;
  void over(const std::string& cause) noexcept LOCKSTEP_REQUIRES(state_.sockets_mutex);

  base::Fd fd_;
  std::uint64_t key_ = 0;  // the reactor's
  GreetingReader reader_;
  // With a job secret, from the introduction on.
  std::optional<net::Opener> opener_;
  std::optional<net::Sealer> sealer_;
  FrameDecoder decoder_;
  bool silent_ = false;
  bool counted_ = false;
};
using TcpAcceptor = LinkAcceptor<TcpIncoming, net::Listener>;

}  // namespace lockstep::transport::internal
