#include "lockstep/store/internal/server_look.h"

#include <chrono>

#include "lockstep/store/internal/uv_view.h"

namespace lockstep::internal {
namespace {

// How long the loop looks for the next request before it sleeps.
constexpr std::chrono::microseconds kServerLook{50};

}  // namespace

void ServerLook::open(uv_loop_t& loop) {
  uv_idle_init(&loop, &idle_);
  idle_.data = this;
}

void ServerLook::close() {
  uv_close(as_handle(&idle_), nullptr);
}

void ServerLook::after_request() {
  if (!may_look_) return;
  const auto now = net::Looks::Clock::now();
  if (!looks_.allowed(now)) return;
  until_ = now + kServerLook;
  if (uv_is_active(as_handle(&idle_)) == 0) uv_idle_start(&idle_, on_idle);
}

// While this is active the loop polls without sleeping.
void ServerLook::on_idle(uv_idle_t* idle) {
  auto& look = *static_cast<ServerLook*>(idle->data);
  auto now = net::Looks::Clock::now();
  if (now < look.until_) now = look.looks_.yield(now);
  if (now >= look.until_ || !look.looks_.allowed(now)) uv_idle_stop(idle);
}

}  // namespace lockstep::internal
