#include "lockstep/store/internal/tcp_door.h"

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

TcpDoor::TcpDoor(net::Listener listener, std::string local_name, std::size_t most_strangers,
                 std::function<void(TcpDoor&, base::Fd)> enter, std::function<void(void*)> expel)
    : listener_(std::move(listener)),
      local_name_(std::move(local_name)),
      most_strangers_(most_strangers),
      enter_(std::move(enter)),
      expel_(std::move(expel)) {}

void TcpDoor::open(uv_loop_t& loop) {
  check_uv(uv_poll_init(&loop, &poll_, listener_.fd()), "uv_poll_init");
  uv_timer_init(&loop, &timer_);
  poll_.data = timer_.data = this;
  open_ = true;
  watch();
}

void TcpDoor::close() {
  if (!std::exchange(open_, false)) return;
  uv_close(reinterpret_cast<uv_handle_t*>(&poll_), nullptr);
  uv_close(reinterpret_cast<uv_handle_t*>(&timer_), nullptr);
}

void TcpDoor::watch() {
  resting_ = false;
  uv_timer_stop(&timer_);
  uv_poll_start(&poll_, UV_READABLE,
                [](uv_poll_t* poll, int, int) { static_cast<TcpDoor*>(poll->data)->accept(); });
}

// Callers wait in the kernel's queue until then, or until a stranger leaves.
void TcpDoor::rest(std::uint64_t ms) {
  resting_ = true;
  uv_poll_stop(&poll_);
  uv_timer_start(
      &timer_, [](uv_timer_t* timer) { static_cast<TcpDoor*>(timer->data)->watch(); }, ms, 0);
}

TcpDoor::Strangers::iterator TcpDoor::arrive(void* who, std::uint64_t origin) {
  ++n_from_[origin];
  return strangers_.insert(strangers_.end(), {.since_ms = uv_now(poll_.loop), .who = who, .origin = origin});
}

void TcpDoor::leave(Strangers::iterator stranger) {
  const auto from = n_from_.find(stranger->origin);
  if (--from->second == 0) n_from_.erase(from);
  strangers_.erase(stranger);
  if (open_ && resting_) watch();
}

// Pre: there are some.
const TcpDoor::Stranger& TcpDoor::next_to_go() const {
  const auto most = std::ranges::max_element(n_from_, {}, [](const auto& from) { return from.second; });
  return *std::ranges::find(strangers_, most->first, &Stranger::origin);
}

bool TcpDoor::make_room() {
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

void TcpDoor::accept() {
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
