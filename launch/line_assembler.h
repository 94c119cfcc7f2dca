// Bytes of one worker's stream become whole lines. A line without its end is given out after a pause, so that a
// prompt is seen; progress bars that rewrite their line with carriage returns are given out once a second, and
// in their last state.
//
// Time is handed in, in nanoseconds of the monotonic clock. Thread safety: none.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::launch {

class LineAssembler {
 public:
  using Emit = std::function<void(std::string_view line)>;  // without the end of line

  static constexpr std::int64_t kPauseNs = 500'000'000;       // until an unfinished line is given out
  static constexpr std::int64_t kProgressNs = 1'000'000'000;  // between two states of a progress line
  static constexpr std::size_t kMaxLine = 64 << 10;           // longer lines are cut

  explicit LineAssembler(Emit emit) : emit_(std::move(emit)) {}

  void feed(std::string_view bytes, std::int64_t now_ns);
  // Gives out what has waited long enough.
  void flush_due(std::int64_t now_ns);
  // The stream has ended: gives out what is left.
  void finish();
  // When flush_due has something to do.
  Deadline due() const;

 private:
  void take(char c);
  void end_line();
  void emit(std::string_view line);

  const Emit emit_;
  std::string line_;      // since the last end of line or carriage return
  std::string progress_;  // what the last carriage return will overwrite
  bool after_return_ = false;
  bool cut_ = false;  // the beginning of this line was given out already
  std::int64_t input_ns_ = 0;
  std::int64_t emit_ns_ = 0;
};

}  // namespace lockstep::launch
