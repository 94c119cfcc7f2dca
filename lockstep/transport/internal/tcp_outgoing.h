// Messages to another worker over TCP. What the socket does not take at once is queued in order, with its
// blobs kept alive.
//
//   kConnecting --writable--> kGreeting --welcome--> kOpen --write failed--> kBroken
//        ^                        |                                            ^
//        '--closed before the ----+-- too many calls, or a refusal: lost ------'
//           welcome: call again
//
// Messages wait in later_ until kOpen: before the welcome nothing is known to be accepted, and a dropped
// connection is repeated without them. After it they are sent at most once. With a job secret everything from
// the welcome on is sealed. Under the peer's mutex, except for on_ready().
#pragma once

#include <deque>
#include <memory>

#include "lockstep/net/address.h"
#include "lockstep/net/sealed.h"
#include "lockstep/transport/internal/tcp_link.h"
#include "lockstep/transport/internal/transport_state.h"

namespace lockstep::transport::internal {

class TcpOutgoing final : public Outgoing, public std::enable_shared_from_this<TcpOutgoing> {
 public:
  // Begins to connect.
  static std::shared_ptr<TcpOutgoing> connect(TransportState& state, const std::shared_ptr<Peer>& peer,
                                              std::optional<Failure>& failure);
  TcpOutgoing(TransportState& state, const std::shared_ptr<Peer>& peer, const net::Address& address);
  ~TcpOutgoing() override;

  void on_ready(std::uint32_t events) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  std::optional<Failure> send(Message message) override;
  void flush() override;
  bool idle() const override { return queue_.empty() && later_.empty() && wire_at_ == wire_.size(); }
  void end(bool gone) noexcept override;

 private:
  struct Queued {
    Bytes head;
    Message message;
    std::uint64_t sent = 0;
    std::uint64_t size = 0;
  };
  enum class Phase : std::uint8_t { kConnecting, kGreeting, kOpen, kBroken };

  // Begins to connect, and queues the first message of the greeting. The errno value when that fails.
  int call(const Peer& peer);
  // For a connection that ended before it was open: why it is over, if it is.
  std::string end_or_call_again(const Peer& peer, std::string why);
  std::string advance(std::uint32_t events);
  std::string greet();
  void introduce(const Bytes& greeting);
  void queue(Bytes head, Message message);
  void write();
  bool write_clear();
  bool write_sealed();
  void seal_some();
  void broke(int code);
  void sent(std::uint64_t n_bytes);
  void watch(bool for_room);

  TransportState& state_;
  const std::weak_ptr<Peer> peer_;
  base::Fd fd_;
  const net::Address address_;
  int n_calls_ = 0;
  // Of the latest call.
  std::optional<GreetingClient> greeting_;
  GreetingReader reader_;
  // With a job secret, from the introduction on. What was queued before goes out in the clear.
  std::optional<net::Sealer> sealer_;
  std::optional<net::Opener> opener_;
  Bytes wire_;  // sealed, or said in the clear before; on its way from wire_at_ on
  std::size_t wire_at_ = 0;
  std::uint64_t key_ = 0;
  Phase phase_ = Phase::kConnecting;
  int broken_ = 0;      // errno of the write that failed
  bool ended_ = false;  // the other side closed it while it was greeted
  bool welcomed_ = false;
  bool watching_room_ = true;
  std::deque<Queued> queue_;
  std::deque<Queued> later_;  // messages, until the greeting is over
};

}  // namespace lockstep::transport::internal
