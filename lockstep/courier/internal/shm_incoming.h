// Another worker of this host that sends to this one: its local socket, and its slot of the inbox once it is let in.
// The socket then only tells of room, of leaving in order, and by its end of the other's end.
#pragma once

#include <memory>

#include "lockstep/courier/internal/office.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::courier::internal {

// Accepts them. Watches until it goes.
class ShmListener final : public Handler {
 public:
  ShmListener(Office& office, net::UnixListener listener) : office_(office), listener_(std::move(listener)) {}
  void on_ready(std::uint32_t events) noexcept override;
  int fd() const { return listener_.fd(); }

 private:
  Office& office_;
  net::UnixListener listener_;
};

class ShmIncoming final : public Incoming, public std::enable_shared_from_this<ShmIncoming> {
 public:
  ShmIncoming(Office& office, net::UnixSocket socket);
  void start();

  void on_ready(std::uint32_t events) noexcept override;
  const std::optional<Intro>& waiting() const override { return waiting_; }
  void let_in(std::shared_ptr<Peer> peer) noexcept override;
  void refuse(const std::string& why) noexcept override;
  void drain() noexcept override;
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  void end() noexcept override;

 private:
  void receive();
  void greet(std::span<const std::uint8_t> message, std::vector<Fd> fds);
  void over(const std::string& cause) noexcept;

  Office& office_;
  net::UnixSocket socket_;
  GreetingServer greeting_;
  std::uint64_t key_ = 0;
  Fd pidfd_;
  Mapping outbox_;
  std::optional<Intro> waiting_;
  std::shared_ptr<Peer> peer_;
  std::optional<std::uint32_t> slot_;
  bool left_ = false;  // said that it leaves
};

// How a process at the other end of a local socket ended, in words. Waits a moment for the kernel to know.
std::string local_end(const Fd& pidfd, bool left);
// Of the process at the other end; empty for this process itself.
Fd pidfd_of(const net::UnixSocket& socket);

}  // namespace lockstep::courier::internal
