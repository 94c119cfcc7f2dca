// Leveled log lines on stderr: "[lockstep I 12:03:44.120 rank 2] text". The level comes from LOCKSTEP_LOG
// (error, warn, info, debug, trace; default warn), or when that is unset from TORCH_CPP_LOG_LEVEL, as in
// torch: ERROR, WARNING and INFO give error, warn and info; INFO gives debug with
// TORCH_DISTRIBUTED_DEBUG=INFO and trace with DETAIL. Thread safety: every function may be called from any
// thread.
#pragma once

#include <string_view>

namespace lockstep {

enum class LogLevel : unsigned char { kError, kWarn, kInfo, kDebug, kTrace };

void set_log_level(LogLevel level) noexcept;
// Reads the environment again; otherwise it is read once, by the first log line.
void set_log_level_from_env() noexcept;

// Sends lines to `sink` instead of stderr until called with nullptr. For tests and for programs with their
// own log.
using LogSink = void (*)(LogLevel level, std::string_view text);
void set_log_sink(LogSink sink) noexcept;

namespace base {
// Cheap; check it before building an expensive line.
bool log_enabled(LogLevel level) noexcept;
void log(LogLevel level, std::string_view text) noexcept;
// Shown in every later line of this thread, and of threads that set none of their own; -1 hides it.
void set_log_rank(int rank) noexcept;
}  // namespace base

}  // namespace lockstep
