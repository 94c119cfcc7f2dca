// What connections from other workers have in common, over local sockets or TCP: they are accepted, greeted, and wait to be let in.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/courier/internal/office.h"

namespace lockstep::courier::internal {

// Accepts them as Links: Link::accept(listener) gives a socket while one waits. Watches until it goes.
template <class Link, class Listener>
class Entrance final : public Handler {
 public:
  Entrance(Office& office, Listener listener) : office_(office), listener_(std::move(listener)) {}
  void on_ready(std::uint32_t) noexcept override {
    try {
      while (auto socket = Link::accept(listener_))
        std::make_shared<Link>(office_, std::move(*socket))->start();
    } catch (const std::exception& error) {
      log(LogLevel::kWarn,
          cat("courier ", office_.options.name, ": a connection was not accepted: ", error.what()));
    }
  }
  int fd() const { return listener_.fd(); }

 private:
  Office& office_;
  Listener listener_;
};

// Knows who calls. How bytes come and go is for who inherits it.
class GreetedIncoming : public Incoming {
 public:
  explicit GreetedIncoming(Office& office)
      : office_(office), greeting_(office.options.secret, office.self.token) {}

  const std::optional<Intro>& waiting() const override { return waiting_; }
  const std::shared_ptr<Peer>& peer() const override { return peer_; }

 protected:
  // The next step of the greeting; a refusal is in the log.
  GreetingServer::Step greet(std::span<const std::uint8_t> message) {
    auto step = greeting_.next(message);
    if (!step.refusal.empty())
      log(LogLevel::kWarn, cat("courier ", office_.options.name, ": refused a connection: ", step.refusal));
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
