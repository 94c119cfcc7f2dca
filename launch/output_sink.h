// What the launcher writes to its own stdout or stderr. Never blocks the loop that watches the workers: what the
// reader does not take yet waits here, and the loop stops reading from the workers while it is full.
//
// The descriptor's flags are left alone (a terminal is shared with the shell): only as much is written as poll(2)
// promises to take. Thread safety: none.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::launch {

class OutputSink {
 public:
  explicit OutputSink(int fd) : fd_(fd) {}

  void write(std::string_view text);
  // Writes what the reader takes now. A reader that is gone makes all later output vanish.
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
  std::size_t at_ = 0;  // written so far
};

}  // namespace lockstep::launch
