#include "lockstep/transport/internal/reactor.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::internal {

Reactor::Reactor() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) base::raise(base::system_failure(errno, "epoll", ErrorFamily::kNetwork));
}

std::uint64_t Reactor::add(int fd, std::uint32_t events, std::shared_ptr<Handler> handler) {
  const base::MutexLock lock(mutex_);
  const std::uint64_t key = next_key_++;
  epoll_event event{.events = events, .data = {.u64 = key}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    base::raise(base::system_failure(errno, "epoll", ErrorFamily::kNetwork));
  }
  handlers_[key] = std::move(handler);
  return key;
}

void Reactor::change(std::uint64_t key, int fd, std::uint32_t events) {
  epoll_event event{.events = events, .data = {.u64 = key}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Reactor::remove(std::uint64_t key, int fd) noexcept {
  std::shared_ptr<Handler> last;  // ends without the lock
  const base::MutexLock lock(mutex_);
  const auto found = handlers_.find(key);
  if (found == handlers_.end()) return;
  last = std::move(found->second);
  handlers_.erase(found);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

// An event carries a key, not a pointer: an earlier handler of the same batch may have removed this one, and
// then the key is not found. The shared_ptr keeps a handler alive that removes itself. Called by one thread
// at a time (sockets_mutex).
bool Reactor::poll_sockets() noexcept {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < n; ++i) {
    std::shared_ptr<Handler> handler;
    {
      const base::MutexLock lock(mutex_);
      const auto found = handlers_.find(events[static_cast<std::size_t>(i)].data.u64);
      if (found != handlers_.end()) handler = found->second;
    }
    if (handler) handler->on_ready(events[static_cast<std::size_t>(i)].events);
  }
  return n > 0;
}

// `all` is declared before the lock, so the handlers are destroyed without it: they may call remove().
void Reactor::clear() noexcept {
  std::unordered_map<std::uint64_t, std::shared_ptr<Handler>> all;
  const base::MutexLock lock(mutex_);
  all.swap(handlers_);
}

}  // namespace lockstep::transport::internal
