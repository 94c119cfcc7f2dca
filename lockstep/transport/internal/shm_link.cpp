#include "lockstep/transport/internal/shm_link.h"

#include <sys/epoll.h>

#include <exception>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::internal {
namespace {

// Between the end of a process's sockets and the end of the process.
constexpr Milliseconds kDying{200};

}  // namespace

std::size_t receive_now(net::UnixSocket& socket, std::span<std::uint8_t> buffer, std::vector<base::Fd>& fds) {
  try {
    return socket.receive(buffer, Deadline::now(), &fds);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return 0;
    throw;
  }
}

void LinkWatch::add(TransportState& state, int socket, std::shared_ptr<Handler> handler) {
  key_ = state.reactor.add(socket, EPOLLIN, std::move(handler));
  fd_ = socket;
}

std::string LinkWatch::cause(TransportState& state, const local::PeerProcess& process, bool left,
                             const std::shared_ptr<Handler>& handler) noexcept {
  constexpr const char* kConnectionEnded = "its connection ended";
  if (left) return kConnectionEnded;
  if (!awaits_process_ && await(state, process, handler)) return {};
  return process.cause(Deadline::now()).value_or(kConnectionEnded);
}

// The socket is taken out first: it stays ready for ever, and would wake every sleeper. When the process
// cannot be watched for want of memory, its end is not waited for.
bool LinkWatch::await(TransportState& state, const local::PeerProcess& process,
                      const std::shared_ptr<Handler>& handler) noexcept {
  if (process.pidfd() < 0 || process.ended()) return false;
  remove(state);
  try {
    state.call_later(handler, Deadline::after(kDying));
    add(state, process.pidfd(), handler);
  } catch (const std::exception&) {
    return false;
  }
  return awaits_process_ = true;
}

void LinkWatch::remove(TransportState& state) noexcept {
  state.reactor.remove(key_, fd_);
}

}  // namespace lockstep::transport::internal
