// One listening socket of a store server's loop. It accepts only while there is room for strangers:
// connections that have not proven who they are share a small quota of their own, so that nobody without the
// secret can exhaust the process's descriptors.
//
//   room                  accept
//   no room               drop the oldest stranger of the quota key (net::quota_key_of) that has most of
//                         them, if it had enough time for its proof; else callers wait in the kernel's queue,
//                         so that a thousand ranks that start together are all served. A flood thus displaces
//                         its own connections, not those of a distant, slow rank
//   no descriptors left   drop one stranger, and accept again a moment later instead of spinning on accept
//
// Thread safety: none; the loop's thread. close() must be called, and the loop run, before it is destroyed.
#pragma once

#include <uv.h>

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <unordered_map>

#include "lockstep/base/detail/fd.h"
#include "lockstep/net/socket.h"

namespace lockstep::internal {

class StoreAcceptor {
 public:
  // A connection that this acceptor has accepted and that has not proven itself yet.
  struct Stranger {
    std::uint64_t since_ms;
    void* who;
    std::uint64_t quota_key;
  };
  using Strangers = std::list<Stranger>;

  // `local_name` is empty for an acceptor on TCP. `enter` receives each new connection; `expel` must call
  // leave() for the stranger it is given.
  StoreAcceptor(net::Listener listener, std::string local_name, std::size_t most_strangers,
                std::function<void(StoreAcceptor&, base::Fd)> enter, std::function<void(void*)> expel);
  StoreAcceptor(const StoreAcceptor&) = delete;
  StoreAcceptor& operator=(const StoreAcceptor&) = delete;

  // Begins to accept on `loop`. Raises DistNetworkError.
  void open(uv_loop_t& loop);
  void close();

  // A new connection, whose session has yet to prove who it is.
  Strangers::iterator arrive(void* who, std::uint64_t quota_key);
  // It has proven itself, or is closed.
  void leave(Strangers::iterator stranger);

  const net::Address& address() const { return listener_.local(); }
  const std::string& local_name() const { return local_name_; }

 private:
  void accept();
  bool make_room();
  const Stranger& next_to_go() const;
  void rest(std::uint64_t ms);
  void watch();

  net::Listener listener_;
  const std::string local_name_;
  const std::size_t most_strangers_;
  const std::function<void(StoreAcceptor&, base::Fd)> enter_;
  const std::function<void(void*)> expel_;
  uv_poll_t poll_{};
  uv_timer_t timer_{};
  Strangers strangers_;                                    // oldest first
  std::unordered_map<std::uint64_t, std::size_t> n_from_;  // of them, by quota_key
  bool resting_ = false;
  bool open_ = false;
};

// How many strangers an acceptor may hold: `wanted`, or less where the process may have few descriptors.
std::size_t strangers_allowed(std::size_t wanted);

}  // namespace lockstep::internal
