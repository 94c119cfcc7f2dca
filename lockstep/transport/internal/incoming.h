// What connections from other workers have in common, over local sockets or TCP: they are accepted, greeted,
// and wait until their worker is known.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/transport/internal/transport_state.h"

namespace lockstep::transport::internal {

// Accepts them as Links: Link::accept_from(listener) returns a socket while one waits, and raises when the
// process has no descriptor for it.
template <class Link, class Listener>
class LinkAcceptor final : public Acceptor,
                           public std::enable_shared_from_this<LinkAcceptor<Link, Listener>> {
 public:
  LinkAcceptor(TransportState& state, Listener listener) : state_(state), listener_(std::move(listener)) {}
  void start() { key_ = state_.reactor.add(listener_.fd(), EPOLLIN, this->shared_from_this()); }
  void on_ready(std::uint32_t) noexcept override LOCKSTEP_REQUIRES(state_.sockets_mutex) {
    try {
      // Others have their turn in between: callers of another user are refused as quickly as they come.
      for (int i = 0; i < kAcceptsPerTurn; ++i) {
        if (!state_.has_room_for_stranger()) return pause();
        auto socket = Link::accept_from(listener_);
        if (!socket) return;
        std::make_shared<Link>(state_, std::move(*socket))->start();
      }
    } catch (const std::exception& error) {
      if (state_.complaints.allowed()) {
        base::log(LogLevel::kWarn, base::cat("transport ", state_.options.name,
                                             ": a connection was not accepted: ", error.what(),
                                             state_.complaints.held_back()));
      }
      state_.drop_stranger();
      pause();
    }
  }
  void resume() noexcept override { state_.reactor.change(key_, listener_.fd(), EPOLLIN); }

 private:
  static constexpr int kAcceptsPerTurn = 64;

  // The listener stays ready, so it must not be watched: a sleeper would wake at once, again and again.
  void pause() noexcept LOCKSTEP_REQUIRES(state_.sockets_mutex) {
    state_.reactor.change(key_, listener_.fd(), 0);
    try {
      state_.pause(this->weak_from_this());
    } catch (const std::bad_alloc&) {
      resume();
    }
  }

  TransportState& state_;
  Listener listener_;
  std::uint64_t key_ = 0;
};

// Runs the greeting. How bytes are read and written is up to the derived class.
class GreetedIncoming : public Incoming {
 public:
  // `address`: at which it was reached; zeros on a local socket.
  GreetedIncoming(TransportState& state, net::Purpose purpose, const net::Address::Canonical& address)
      : state_(state),
        greeting_(state.options.secret,
                  {.purpose = purpose, .server = state.self.token, .address = address}) {}

  const std::optional<Intro>& waiting() const override { return waiting_; }
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  bool is_stranger() const override { return !greeting_.proven(); }

 protected:
  std::optional<net::SessionKeys> keys() const { return greeting_.keys(); }
  // The next step of the greeting; a refusal is logged.
  GreetingServer::Step greet(std::span<const std::uint8_t> message) LOCKSTEP_REQUIRES(state_.sockets_mutex) {
    auto step = greeting_.next(message);
    if (!step.refusal.empty() && state_.complaints.allowed()) {
      base::log(LogLevel::kWarn, base::cat("transport ", state_.options.name, ": refused a connection: ",
                                           step.refusal, state_.complaints.held_back()));
    }
    return step;
  }
  // Its introduction is complete; it is accepted now, or once its worker is known.
  void wait_as(Intro intro) LOCKSTEP_REQUIRES(state_.sockets_mutex) {
    waiting_ = std::move(intro);
    state_.accept_pending();
  }

  TransportState& state_;
  std::optional<Intro> waiting_;
  std::shared_ptr<Peer> peer_;

 private:
  GreetingServer greeting_;
};

}  // namespace lockstep::transport::internal
