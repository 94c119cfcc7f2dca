// What connections from other workers have in common, over local sockets or TCP: they are accepted, greeted, and wait to be let in.
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
#include "lockstep/courier/internal/office.h"

namespace lockstep::courier::internal {

// Accepts them as Links: Link::accept(listener) gives a socket while one waits, and raises when the process has no
// descriptor for it. Watches until it goes.
template <class Link, class Listener>
class Entrance final : public Doorway, public std::enable_shared_from_this<Entrance<Link, Listener>> {
 public:
  Entrance(Office& office, Listener listener) : office_(office), listener_(std::move(listener)) {}
  void start() { key_ = office_.reactor.add(listener_.fd(), EPOLLIN, this->shared_from_this()); }
  void on_ready(std::uint32_t) noexcept override {
    try {
      for (;;) {
        if (!office_.has_room_for_stranger()) return rest();
        auto socket = Link::accept(listener_);
        if (!socket) return;
        std::make_shared<Link>(office_, std::move(*socket))->start();
      }
    } catch (const std::exception& error) {
      base::log(LogLevel::kWarn, base::cat("courier ", office_.options.name,
                                           ": a connection was not accepted: ", error.what()));
      office_.expel_stranger();
      rest();
    }
  }
  void go_on() noexcept override { office_.reactor.change(key_, listener_.fd(), EPOLLIN); }

 private:
  // The socket stays ready, so it must not be watched: whoever sleeps would wake at once, again and again.
  void rest() noexcept {
    office_.reactor.change(key_, listener_.fd(), 0);
    try {
      office_.rest(this->weak_from_this());
    } catch (const std::bad_alloc&) {
      go_on();
    }
  }

  Office& office_;
  Listener listener_;
  std::uint64_t key_ = 0;
};

// Knows who calls. How bytes come and go is for who inherits it.
class GreetedIncoming : public Incoming {
 public:
  // `address`: at which it was reached; zeros on a local socket.
  GreetedIncoming(Office& office, net::Purpose purpose, const net::Address::Canonical& address)
      : office_(office),
        greeting_(office.options.secret,
                  {.purpose = purpose, .server = office.self.token, .address = address}) {}

  const std::optional<Intro>& waiting() const override { return waiting_; }
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  bool is_stranger() const override { return !greeting_.proven(); }

 protected:
  std::optional<net::SessionKeys> keys() const { return greeting_.keys(); }
  // The next step of the greeting; a refusal is in the log.
  GreetingServer::Step greet(std::span<const std::uint8_t> message) {
    auto step = greeting_.next(message);
    if (!step.refusal.empty() && office_.complaints.allowed()) {
      base::log(LogLevel::kWarn, base::cat("courier ", office_.options.name, ": refused a connection: ",
                                           step.refusal, office_.complaints.held_back()));
    }
    return step;
  }
  // It has said who it is; it is let in now, or once its worker is known.
  void wait_as(Intro intro) {
    waiting_ = std::move(intro);
    office_.let_in_guests();
  }

  Office& office_;
  std::uint64_t key_ = 0;  // the reactor's
  std::optional<Intro> waiting_;
  std::shared_ptr<Peer> peer_;

 private:
  GreetingServer greeting_;
};

}  // namespace lockstep::courier::internal
