#include "launch/output_sink.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace lockstep::launch {

void OutputSink::write(std::string_view text) {
  if (fd_ < 0) return;
  buffer_ += text;
  pump();
}

// poll first, and at most PIPE_BUF bytes at a time: a pipe that is writable takes that many without blocking,
// although the descriptor is in blocking mode, which it shares with other processes. An error (nobody reads)
// ends the output, not the job.
void OutputSink::pump() {
  while (!empty()) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (::poll(&ready, 1, 0) <= 0) break;
    const std::size_t n = std::min<std::size_t>(buffer_.size() - at_, PIPE_BUF);
    const ssize_t written = ::write(fd_, buffer_.data() + at_, n);
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) break;
    if (written < 0) {
      fd_ = -1;
      at_ = buffer_.size();
      break;
    }
    at_ += static_cast<std::size_t>(written);
  }
  if (empty() || at_ > kFull) {
    buffer_.erase(0, at_);
    at_ = 0;
  }
}

void OutputSink::drain(Deadline deadline) {
  while (!empty() && !deadline.expired()) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    ::poll(&ready, 1, deadline.poll_timeout_ms());
    pump();
  }
}

bool OutputSink::is_terminal() const {
  return fd_ >= 0 && ::isatty(fd_) == 1;
}

}  // namespace lockstep::launch
