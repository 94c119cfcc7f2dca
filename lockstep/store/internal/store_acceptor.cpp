#include "lockstep/store/internal/store_acceptor.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/uv_view.h"

namespace lockstep::internal {

namespace {

// A stranger has this long before it may be asked to make way; half a round trip around the world.
constexpr std::uint64_t kGraceMs = 100;
constexpr std::uint64_t kOutOfDescriptorsMs = 50;
// Accepted in one go before those inside have their turn.
constexpr int kTurn = 64;

}  // namespace

std::size_t strangers_allowed(std::size_t wanted) {
  constexpr std::size_t kFewest = 4;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
  return std::min(wanted, std::max<std::size_t>(kFewest, limit.rlim_cur / 8));
}

StoreAcceptor::StoreAcceptor(net::Listener listener, std::string local_name, std::size_t most_strangers,
                             std::function<void(StoreAcceptor&, base::Fd)> enter,
                             std::function<void(void*)> expel)
    : listener_(std::move(listener)),
      local_name_(std::move(local_name)),
      most_strangers_(most_strangers),
      enter_(std::move(enter)),
      expel_(std::move(expel)) {}

// Of handles that were initialised close() must be called before the loop ends: libuv keeps pointers to them.
void StoreAcceptor::open(uv_loop_t& loop) {
  check_uv(uv_poll_init(&loop, &poll_, listener_.fd()), "uv_poll_init");
  uv_timer_init(&loop, &timer_);
  poll_.data = timer_.data = this;
  open_ = true;
  watch();
}

void StoreAcceptor::close() {
  if (!std::exchange(open_, false)) return;
  uv_close(as_handle(&poll_), nullptr);
  uv_close(as_handle(&timer_), nullptr);
}

void StoreAcceptor::watch() {
  resting_ = false;
  uv_timer_stop(&timer_);
  uv_poll_start(&poll_, UV_READABLE,
                [](uv_poll_t* poll, int, int) { static_cast<StoreAcceptor*>(poll->data)->accept(); });
}

// Callers wait in the kernel's queue until then, or until a stranger leaves.
void StoreAcceptor::rest(std::uint64_t ms) {
  resting_ = true;
  uv_poll_stop(&poll_);
  uv_timer_start(
      &timer_, [](uv_timer_t* timer) { static_cast<StoreAcceptor*>(timer->data)->watch(); }, ms, 0);
}

StoreAcceptor::Strangers::iterator StoreAcceptor::arrive(void* who, std::uint64_t quota_key) {
  ++n_from_[quota_key];
  return strangers_.insert(strangers_.end(),
                           {.since_ms = uv_now(poll_.loop), .who = who, .quota_key = quota_key});
}

// A place is free: callers in the kernel's queue need not wait for the timer.
void StoreAcceptor::leave(Strangers::iterator stranger) {
  const auto from = n_from_.find(stranger->quota_key);
  if (--from->second == 0) n_from_.erase(from);
  strangers_.erase(stranger);
  if (open_ && resting_) watch();
}

// Pre: there are some.
const StoreAcceptor::Stranger& StoreAcceptor::next_to_go() const {
  const auto most = std::ranges::max_element(n_from_, {}, [](const auto& from) { return from.second; });
  return *std::ranges::find(strangers_, most->first, &Stranger::quota_key);
}

// expel_ calls leave(), which erases `next`: it is not used afterwards.
bool StoreAcceptor::make_room() {
  if (strangers_.size() < most_strangers_) return true;
  const Stranger& next = next_to_go();
  const std::uint64_t age = uv_now(poll_.loop) - next.since_ms;
  if (age < kGraceMs) {
    rest(kGraceMs - age);
    return false;
  }
  expel_(next.who);
  return true;
}

void StoreAcceptor::accept() {
  for (int turn = 0; turn < kTurn; ++turn) {
    if (!make_room()) return;
    base::Fd fd(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      enter_(*this, std::move(fd));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // leave() would watch again at once: the place it made is for whoever needs a descriptor first.
      if (!strangers_.empty()) expel_(next_to_go().who);
      return rest(kOutOfDescriptorsMs);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;  // nobody waits, or this caller is gone
    }
  }
}

}  // namespace lockstep::internal
