// The sockets of one transport and their handlers. It has no thread: poll_sockets() is called by the threads
// that poll or wait, one at a time (TransportState::sockets_mutex). Thread safety: every method. Handlers are
// called without the reactor's lock and may add and remove.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::transport::internal {

class Handler {
 public:
  virtual ~Handler() = default;
  // `events` as epoll reports them. Never throws.
  virtual void on_ready(std::uint32_t events) noexcept = 0;
};

class Reactor {
 public:
  Reactor();

  // Watches `fd`, which must outlive remove(), and keeps the handler alive meanwhile. Raises kResource or
  // kSystem.
  std::uint64_t add(int fd, std::uint32_t events, std::shared_ptr<Handler> handler);
  void change(std::uint64_t key, int fd, std::uint32_t events);
  void remove(std::uint64_t key, int fd) noexcept;
  // Calls the handlers of what is ready now; true when there was something. One caller at a time.
  bool poll_sockets() noexcept;
  void clear() noexcept;

  int fd() const { return epoll_.get(); }

 private:
  const base::Fd epoll_;
  base::Mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Handler>> handlers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t next_key_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
};

}  // namespace lockstep::transport::internal
