// Messages to another worker over TCP. What the socket does not take at once waits in order, held by its owners.
#pragma once

#include <deque>
#include <memory>

#include "lockstep/courier/internal/office.h"
#include "lockstep/courier/internal/tcp_link.h"
#include "lockstep/net/address.h"

namespace lockstep::courier::internal {

class TcpOutgoing final : public Outgoing, public std::enable_shared_from_this<TcpOutgoing> {
 public:
  // Begins to connect.
  static std::shared_ptr<TcpOutgoing> connect(Office& office, const std::shared_ptr<Peer>& peer,
                                              std::optional<Failure>& failure);
  TcpOutgoing(Office& office, const std::shared_ptr<Peer>& peer, Fd fd);
  ~TcpOutgoing() override;

  void on_ready(std::uint32_t events) noexcept override;
  std::optional<Failure> send(Message message) override;
  void flush() override;
  bool idle() const override { return queue_.empty() && later_.empty(); }
  void end(bool gone) noexcept override;

 private:
  struct Queued {
    Bytes head;
    Message message;
    std::uint64_t sent = 0;
    std::uint64_t size = 0;
  };
  enum class State : std::uint8_t { kConnecting, kGreeting, kOpen, kBroken };

  std::string advance(std::uint32_t events);
  std::string greet();
  void queue(Bytes head, Message message);
  void write();
  void sent(std::uint64_t n_bytes);
  void watch(bool for_room);

  Office& office_;
  const std::weak_ptr<Peer> peer_;
  Fd fd_;
  GreetingClient greeting_;
  GreetingReader reader_;
  std::uint64_t key_ = 0;
  State state_ = State::kConnecting;
  int broken_ = 0;  // errno of the write that failed
  bool watching_room_ = true;
  std::deque<Queued> queue_;
  std::deque<Queued> later_;  // messages, until the greeting is over
};

}  // namespace lockstep::courier::internal
