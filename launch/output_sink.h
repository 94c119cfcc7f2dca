// The launcher's own stdout or stderr. Never blocks the loop that watches the workers: output that cannot be
// written yet is buffered, and the loop stops reading from the workers while the buffer is full.
//
// The descriptor's flags are not changed (a terminal is shared with the shell): writes only when poll(2)
// reports room. Thread safety: none.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::launch {

class OutputSink {
 public:
  explicit OutputSink(int fd) : fd_(fd) {}

  void write(std::string_view text);
  // Writes as much as possible without blocking. Once the reader has closed, all later output is discarded.
  void pump();
  // pump() until empty or the deadline.
  void drain(Deadline deadline);

  int fd() const { return fd_; }
  bool empty() const { return at_ == buffer_.size(); }
  bool full() const { return buffer_.size() - at_ > kFull; }
  bool is_terminal() const;

 private:
  static constexpr std::size_t kFull = 1 << 20;
  int fd_;
  std::string buffer_;
  std::size_t at_ = 0;  // start of the unwritten bytes
};

}  // namespace lockstep::launch
