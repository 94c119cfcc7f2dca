// How a store server's loop looks for the next request before it sleeps: a client that asks one thing after
// the other is answered without waking a core each time.
//
// While it looks, an idle handle keeps libuv from sleeping, and the core is yielded in between. It looks for
// a short while after each request, where there is more than one core, and as long as net::Looks allows it.
// Thread safety: none; used by the loop thread alone.
#pragma once

#include <uv.h>

#include "lockstep/base/detail/process.h"
#include "lockstep/net/looks.h"

namespace lockstep::internal {

class ServerLook final {
 public:
  ServerLook() = default;
  ServerLook(const ServerLook&) = delete;
  ServerLook& operator=(const ServerLook&) = delete;

  // Before anything else. From here on it must live until the loop has ended.
  void open(uv_loop_t& loop);
  void close();
  // A request has come: looks for the next one.
  void after_request();

 private:
  static void on_idle(uv_idle_t* idle);

  uv_idle_t idle_{};
  const bool may_look_ = base::available_cores() > 1;
  net::Looks looks_;
  net::Looks::Clock::time_point until_{};
};

}  // namespace lockstep::internal
