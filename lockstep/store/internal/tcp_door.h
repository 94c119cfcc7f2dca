// One listening socket of a store server's loop. It accepts only while there is room for strangers: connections that
// have not yet proven who they are get a small number of places of their own, so that nobody without the secret can use
// up the process's descriptors.
//
//   room        accept
//   no room     of the strangers from where most of them come (net::origin_of) the oldest makes way, if it had time enough; else
//               callers wait in the kernel's queue, so that a thousand ranks that start together are all served. Whoever
//               floods the door pushes out his own, not a rank that calls from far away and is slow to prove itself
//   no descriptors left   one stranger makes way; the door opens again a moment later, instead of spinning on accept
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

class TcpDoor {
 public:
  // Whoever came in by this door and is not known yet, by the time since when.
  struct Stranger {
    std::uint64_t since_ms;
    void* who;
    std::uint64_t origin;
  };
  using Strangers = std::list<Stranger>;

  // `local_name` is empty for a door on TCP. `enter` gets each new connection; `expel` must call leave() for the
  // stranger it is given.
  TcpDoor(net::Listener listener, std::string local_name, std::size_t most_strangers,
          std::function<void(TcpDoor&, base::Fd)> enter, std::function<void(void*)> expel);
  TcpDoor(const TcpDoor&) = delete;
  TcpDoor& operator=(const TcpDoor&) = delete;

  // Begins to accept on `loop`. Raises DistNetworkError.
  void open(uv_loop_t& loop);
  void close();

  // Somebody came in whose session has yet to say who it is.
  Strangers::iterator arrive(void* who, std::uint64_t origin);
  // It has said so, or is gone.
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
  const std::function<void(TcpDoor&, base::Fd)> enter_;
  const std::function<void(void*)> expel_;
  uv_poll_t poll_{};
  uv_timer_t timer_{};
  Strangers strangers_;                                    // oldest first
  std::unordered_map<std::uint64_t, std::size_t> n_from_;  // of them, by origin
  bool resting_ = false;
  bool open_ = false;
};

// How many strangers a door may hold: `wanted`, or less where the process may have few descriptors.
std::size_t strangers_allowed(std::size_t wanted);

}  // namespace lockstep::internal
