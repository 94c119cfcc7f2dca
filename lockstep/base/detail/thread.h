// A thread with a name that gdb, top and TSan show. Always joined: the destructor waits for it, so whoever owns
// one must be able to make its function return first (docs/threads.md lists them all).
#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

namespace lockstep::base {

class Thread {
 public:
  Thread() = default;
  // `name` is cut to the kernel's 15 characters.
  template <class Function>
  Thread(std::string name, Function function)
      : thread_([name = name.substr(0, 15), function = std::move(function)]() mutable {
          pthread_setname_np(pthread_self(), name.c_str());
          function();
        }) {}
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~Thread() { join(); }

  bool joinable() const { return thread_.joinable(); }
  std::thread::id id() const { return thread_.get_id(); }
  // No-op when there is nothing to join.
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace lockstep::base
