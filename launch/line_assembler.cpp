#include "launch/line_assembler.h"

#include <algorithm>
#include <utility>

namespace lockstep::launch {

void LineAssembler::feed(std::string_view bytes, std::int64_t now_ns) {
  input_ns_ = now_ns;
  for (const char c : bytes) take(c);
  flush_due(now_ns);
}

void LineAssembler::take(char c) {
  if (c == '\n') return end_line();
  if (std::exchange(after_return_, c == '\r') && !line_.empty()) progress_ = std::exchange(line_, {});
  if (c == '\r') return;
  line_ += c;
  if (line_.size() < kMaxLine) return;
  emit(std::exchange(line_, {}));
  cut_ = true;
}

void LineAssembler::end_line() {
  after_return_ = false;
  const bool nothing_new = line_.empty() && progress_.empty();
  if (!(cut_ && nothing_new)) emit(line_.empty() ? progress_ : line_);
  line_.clear();
  progress_.clear();
  cut_ = false;
}

void LineAssembler::flush_due(std::int64_t now_ns) {
  if (!progress_.empty() && now_ns >= emit_ns_ + kProgressNs) {
    emit(std::exchange(progress_, {}));
    emit_ns_ = now_ns;
    cut_ = true;
  }
  if (!line_.empty() && now_ns >= input_ns_ + kPauseNs) {
    emit(std::exchange(line_, {}));
    progress_.clear();
    cut_ = true;
  }
}

void LineAssembler::finish() {
  if (!line_.empty() || !progress_.empty()) end_line();
}

Deadline LineAssembler::due() const {
  Deadline due = Deadline::never();
  if (!line_.empty()) due = Deadline::from_monotonic_ns(input_ns_ + kPauseNs);
  if (!progress_.empty()) due = std::min(due, Deadline::from_monotonic_ns(emit_ns_ + kProgressNs));
  return due;
}

void LineAssembler::emit(std::string_view line) {
  emit_(line);
}

}  // namespace lockstep::launch
