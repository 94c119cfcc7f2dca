// Messages to another worker of this host: records into a ring of its inbox, large parts through the own
// heap. What does not fit waits in process memory, in order, until the receiver notifies it on the socket
// that there is room.
//
//   call() --greeting, welcome with inbox and bell--> open --end(), or the socket ends--> over
//     ^                |
//     '--dropped before it was open, at most kMostCalls times
//
// Under the peer's mutex, except for on_ready().
#pragma once

#include <deque>
#include <memory>

#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/shm_link.h"
#include "lockstep/transport/internal/transport_state.h"

namespace lockstep::transport::internal {

class ShmOutgoing final : public Outgoing, public std::enable_shared_from_this<ShmOutgoing> {
 public:
  // Connects, without waiting for the answer. A failure when nobody is there.
  static std::shared_ptr<ShmOutgoing> connect(TransportState& state, const std::shared_ptr<Peer>& peer,
                                              std::optional<Failure>& failure);
  ShmOutgoing(TransportState& state, const std::shared_ptr<Peer>& peer, net::UnixSocket socket);

  void on_ready(std::uint32_t events) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex);
  std::optional<Failure> send(Message message) override;
  void flush() override;
  bool idle() const override { return backlog_.empty(); }
  void end(bool gone) noexcept override;

 private:
  // Why the connection is over; empty when it is not.
  std::string receive();
  std::string greet(std::span<const std::uint8_t> message, std::vector<base::Fd> fds);
  // Sends the first message of the greeting on a new socket.
  void call(const Peer& peer);
  // Sends unsent_, unless the system does not take descriptors now.
  void introduce();
  void set_unsent(Bytes message) noexcept;
  // For a connection that ended before it was open. False: it stays over.
  bool call_again(const Peer& peer);
  bool called_again(const Peer& peer) noexcept;
  bool write(std::span<const std::uint8_t> record);
  void take_back_unread() noexcept;

  TransportState& state_;
  const std::weak_ptr<Peer> peer_;
  net::UnixSocket socket_;
  std::optional<GreetingClient> greeting_;  // of the latest call
  // The introduction, until the system takes it: a user may have only so many descriptors on their way, and
  // the kernel does not tell when there are fewer. flush() tries again.
  Bytes unsent_;
  int n_calls_ = 0;
  const std::shared_ptr<Holder> holder_;
  LinkWatch watch_;
  bool open_ = false;
  bool left_ = false;
  Inbox inbox_;    // the receiver's
  base::Fd bell_;  // the receiver's
  std::uint32_t slot_ = 0;
  RingWriter ring_;
  Bytes record_;  // kept for its memory
  std::deque<Bytes> backlog_;
};

}  // namespace lockstep::transport::internal
