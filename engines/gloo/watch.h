// One thread for all communicators of the process: it detects sockets whose other end hung up, and deadlines
// that pass. Callbacks run on it, under its lock, so that remove_*() can guarantee that none runs afterwards;
// they must be short and pass the work to the pool. Thread safety: every method, from any thread except the
// watch's own.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <thread>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/engine/engine_abi.h"

namespace lockstep::gloo_plugin {

class Watch {
 public:
  using Id = std::uint64_t;  // 0: none

  // Raises Error when the system refuses a descriptor.
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;

  // Calls `hung_up` once when the peer of the connected socket closes or shuts down, or the connection dies.
  Id add_socket(int fd, std::function<void()> hung_up);
  // Calls `passed` once when the deadline has passed, and before that `lasted`, if there is one, at
  // lasted_ns. A time that is LOCKSTEP_NEVER never comes; returns 0 when both are.
  Id add_deadline(std::int64_t deadline_ns, std::function<void()> passed,
                  std::int64_t lasted_ns = LOCKSTEP_NEVER, std::function<void()> lasted = {});
  // After these return the callback does not run and will not. 0 and unknown ids are ignored.
  void remove_socket(Id id);
  void remove_deadline(Id id);

 private:
  struct Socket {
    int fd;
    std::function<void()> hung_up;
  };
  struct Alarm {
    std::int64_t at_ns;  // what comes next: lasted, while it is there, or the deadline
    std::int64_t deadline_ns;
    std::function<void()> passed;
    std::function<void()> lasted;
  };
  void serve();
  // Pre: it is due, and out of order_.
  void go_off(Id id) LOCKSTEP_REQUIRES(mutex_);
  // How long nothing is due.
  int wait_ms() LOCKSTEP_REQUIRES(mutex_);
  void ring();

  int epoll_ = -1, bell_ = -1;
  base::Mutex mutex_;
  Id next_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::int64_t sleeps_until_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::map<Id, Socket> sockets_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<Id, Alarm> alarms_ LOCKSTEP_GUARDED_BY(mutex_);
  std::multimap<std::int64_t, Id> order_ LOCKSTEP_GUARDED_BY(mutex_);  // of alarms_

  std::thread thread_;
};

}  // namespace lockstep::gloo_plugin
