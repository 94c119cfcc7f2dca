#include "engines/gloo/watch.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {

Watch::Watch() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN;
  // 0 is the bell; ids of sockets and alarms begin at 1.
  event.data.u64 = 0;
  if (epoll_ < 0 || bell_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, bell_, &event) != 0) {
    const std::string why = std::strerror(errno);
    if (epoll_ >= 0) ::close(epoll_);
    if (bell_ >= 0) ::close(bell_);
    raise(LOCKSTEP_RESOURCE, cat("the watch over the connections cannot start: ", why));
  }
  thread_ = std::thread([this] { serve(); });
}

Watch::~Watch() {
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
  }
  ring();
  thread_.join();
  ::close(epoll_);
  ::close(bell_);
}

void Watch::ring() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(bell_, &one, sizeof one);
}

Watch::Id Watch::add_socket(int fd, std::function<void()> hung_up) {
  const base::MutexLock lock(mutex_);
  const Id id = next_++;
  epoll_event event{};
  // Only the end is of interest, once: the bytes are gloo's to read, and a level-triggered hang-up would wake
  // the thread for ever.
  event.events = EPOLLRDHUP | EPOLLONESHOT;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    raise(LOCKSTEP_RESOURCE, cat("a connection cannot be watched: ", std::strerror(errno)));
  }
  sockets_.emplace(id, Socket{fd, std::move(hung_up)});
  return id;
}

Watch::Id Watch::add_deadline(std::int64_t deadline_ns, std::function<void()> passed, std::int64_t lasted_ns,
                              std::function<void()> lasted) {
  if (lasted_ns >= deadline_ns) lasted = nullptr;
  // An alarm goes off at most twice: first when the operation has lasted long enough for a log line, then at
  // its deadline.
  const std::int64_t at_ns = lasted ? lasted_ns : deadline_ns;
  if (at_ns == LOCKSTEP_NEVER) return 0;
  const base::MutexLock lock(mutex_);
  const Id id = next_++;
  alarms_.emplace(id, Alarm{at_ns, deadline_ns, std::move(passed), std::move(lasted)});
  order_.emplace(at_ns, id);
  // Only when the thread would sleep past it. sleeps_until_ is what it last computed, under this mutex.
  if (at_ns < sleeps_until_) ring();
  return id;
}

// The mutex is held while a callback runs, so this waits for one in progress: afterwards its captures may be
// destroyed.
void Watch::remove_socket(Id id) {
  const base::MutexLock lock(mutex_);
  const auto found = sockets_.find(id);
  if (found == sockets_.end()) return;
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, found->second.fd, nullptr);
  sockets_.erase(found);
}

void Watch::remove_deadline(Id id) {
  if (id == 0) return;
  const base::MutexLock lock(mutex_);
  const auto found = alarms_.find(id);
  if (found == alarms_.end()) return;
  const auto [first, last] = order_.equal_range(found->second.at_ns);
  const auto next = std::find_if(first, last, [id](const auto& each) { return each.second == id; });
  if (next != last) order_.erase(next);  // it has lasted, and has no deadline
  alarms_.erase(found);
}

void Watch::go_off(Id id) {
  const auto found = alarms_.find(id);
  Alarm& alarm = found->second;
  if (const auto lasted = std::exchange(alarm.lasted, nullptr)) {
    alarm.at_ns = alarm.deadline_ns;
    if (alarm.at_ns != LOCKSTEP_NEVER) order_.emplace(alarm.at_ns, id);
    return lasted();
  }
  const auto passed = std::move(alarm.passed);
  alarms_.erase(found);
  passed();
}

// Rounded up, so that the thread does not wake just before the alarm and poll. An hour at most: the argument
// is an int.
int Watch::wait_ms() {
  sleeps_until_ = order_.empty() ? LOCKSTEP_NEVER : order_.begin()->first;
  if (order_.empty()) return -1;
  const std::int64_t left = sleeps_until_ - now_ns();
  return left <= 0 ? 0 : static_cast<int>(std::min<std::int64_t>(left / 1'000'000 + 1, 3'600'000));
}

// Callbacks run under mutex_ (watch.h). An id whose socket or alarm was removed while the thread slept is not
// found, and ignored.
void Watch::serve() {
  ::pthread_setname_np(::pthread_self(), "ls-gloo-watch");
  std::array<epoll_event, 64> events{};
  base::MutexLock lock(mutex_);
  while (!stopping_) {
    const int ms = wait_ms();
    lock.unlock();
    const int n = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), ms);
    lock.lock();
    for (int i = 0; i < n; ++i) {
      const Id id = events[static_cast<std::size_t>(i)].data.u64;
      std::uint64_t rung = 0;
      if (id == 0) {
        [[maybe_unused]] const auto got = ::read(bell_, &rung, sizeof rung);
      } else if (const auto found = sockets_.find(id); found != sockets_.end()) {
        found->second.hung_up();
      }
    }
    while (!order_.empty() && order_.begin()->first <= now_ns()) {
      const Id id = order_.begin()->second;
      order_.erase(order_.begin());
      go_off(id);
    }
  }
}

}  // namespace lockstep::gloo_plugin
