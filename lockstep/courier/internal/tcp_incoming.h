// A worker that sends to this one over TCP: greetings first, then frames until the connection ends.
#pragma once

#include <memory>

#include "lockstep/courier/internal/frame.h"
#include "lockstep/courier/internal/office.h"
#include "lockstep/courier/internal/tcp_link.h"
#include "lockstep/net/socket.h"

namespace lockstep::courier::internal {

// Accepts them. Watches until it goes.
class TcpListener final : public Handler {
 public:
  TcpListener(Office& office, net::Listener listener) : office_(office), listener_(std::move(listener)) {}
  void on_ready(std::uint32_t events) noexcept override;
  int fd() const { return listener_.fd(); }

 private:
  Office& office_;
  net::Listener listener_;
};

class TcpIncoming final : public Incoming, public std::enable_shared_from_this<TcpIncoming> {
 public:
  TcpIncoming(Office& office, Fd fd);
  void start();

  void on_ready(std::uint32_t events) noexcept override;
  const std::optional<Intro>& waiting() const override { return waiting_; }
  void let_in(std::shared_ptr<Peer> peer) noexcept override;
  void refuse(const std::string& why) noexcept override;
  void drain() noexcept override;
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  void end() noexcept override;

 private:
  // Why the connection is over; nothing when it is not.
  std::optional<std::string> greet();
  std::optional<std::string> read_frames(std::uint64_t at_most);
  bool say(std::span<const std::uint8_t> greeting) noexcept;
  void over(const std::string& cause) noexcept;

  Office& office_;
  Fd fd_;
  GreetingServer greeting_;
  GreetingReader reader_;
  FrameDecoder decoder_;
  std::uint64_t key_ = 0;
  std::optional<Intro> waiting_;
  std::shared_ptr<Peer> peer_;
  bool silent_ = false;
  bool counted_ = false;
};

}  // namespace lockstep::courier::internal
