// A named thread (the name shows in gdb, top and TSan). The destructor joins, so the owner must first make
// the thread's function return. docs/threads.md lists every thread.
// Thread safety: none; one owner.
#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

namespace lockstep::base {

class Thread {
 public:
  Thread() = default;
  // `name` is truncated to the kernel's limit of 15 characters.
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
  // No-op when not joinable.
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace lockstep::base
