// Assembles one worker's stream into whole lines. An unterminated line is emitted after a pause, so that
// prompts are visible; progress bars that rewrite their line with carriage returns are emitted once a second,
// and in their final state.
//
// The caller passes the time, in nanoseconds of the monotonic clock. Thread safety: none.
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

  static constexpr std::int64_t kPauseNs = 500'000'000;       // until an unterminated line is emitted
  static constexpr std::int64_t kProgressNs = 1'000'000'000;  // between two states of a progress line
  static constexpr std::size_t kMaxLine = 64 << 10;           // longer lines are split

  explicit LineAssembler(Emit emit) : emit_(std::move(emit)) {}

  void feed(std::string_view bytes, std::int64_t now_ns);
  // Emits what is due.
  void flush_due(std::int64_t now_ns);
  // End of stream: emits the rest.
  void finish();
  // When flush_due must be called next.
  Deadline due() const;

 private:
  void take(char c);
  void end_line();
  void emit(std::string_view line);

  const Emit emit_;
  std::string line_;      // since the last end of line or carriage return
  std::string progress_;  // text that the last carriage return overwrites
  bool after_return_ = false;
  bool cut_ = false;  // the beginning of this line was already emitted
  std::int64_t input_ns_ = 0;
  std::int64_t emit_ns_ = 0;
};

}  // namespace lockstep::launch
