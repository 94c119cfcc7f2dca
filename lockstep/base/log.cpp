#include "lockstep/base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <memory>

#include "lockstep/base/detail/environment.h"

namespace lockstep {
namespace {

constexpr int kUnset = -2;
std::atomic<int> g_process_rank{-1};
thread_local int t_rank = kUnset;
std::atomic<LogSink> g_sink{nullptr};

// Case-insensitive, as in debug.h.
bool is_debug(std::string_view wanted) {
  const auto text = base::environment(base::EnvVar::kDistributedDebug).value_or("");
  return std::ranges::equal(text, wanted, {}, [](unsigned char c) { return std::toupper(c); });
}

LogLevel level_from_environment() {
  const auto text = base::environment(base::EnvVar::kLockstepLog);
  if (text == "error") return LogLevel::kError;
  if (text == "info") return LogLevel::kInfo;
  if (text == "debug") return LogLevel::kDebug;
  if (text == "trace") return LogLevel::kTrace;
  if (text) return LogLevel::kWarn;
  const auto torch_level = base::environment(base::EnvVar::kTorchCppLogLevel);
  if (torch_level == "ERROR" || torch_level == "2" || torch_level == "FATAL" || torch_level == "3")
    return LogLevel::kError;
  if (torch_level != "INFO" && torch_level != "0") return LogLevel::kWarn;
  if (is_debug("DETAIL")) return LogLevel::kTrace;
  return is_debug("INFO") ? LogLevel::kDebug : LogLevel::kInfo;
}

std::atomic<LogLevel>& level_cell() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

spdlog::logger& logger() {
  // Leaked on purpose: threads may log while static objects are being destroyed.
  static auto* instance = [] {
    auto* made = new spdlog::logger("lockstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::trace);
    made->set_pattern("[lockstep %L %H:%M:%S.%e%v");
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *instance;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kTrace:
      return spdlog::level::trace;
  }
  return spdlog::level::err;
}

}  // namespace

namespace base {

bool log_enabled(LogLevel level) noexcept {
  return level <= level_cell().load(std::memory_order_relaxed);
}

void log(LogLevel level, std::string_view text) noexcept {
  if (!log_enabled(level)) return;
  if (const LogSink sink = g_sink.load()) return sink(level, text);
  const int rank = t_rank != kUnset ? t_rank : g_process_rank.load(std::memory_order_relaxed);
  if (rank >= 0) {
    logger().log(to_spdlog(level), " rank {}] {}", rank, text);
  } else {
    logger().log(to_spdlog(level), "] {}", text);
  }
}

}  // namespace base

void set_log_level(LogLevel level) noexcept {
  level_cell().store(level, std::memory_order_relaxed);
}

void set_log_level_from_env() noexcept {
  set_log_level(level_from_environment());
}

void base::set_log_rank(int rank) noexcept {
  t_rank = rank;
  g_process_rank.store(rank, std::memory_order_relaxed);
}

void set_log_sink(LogSink sink) noexcept {
  g_sink.store(sink);
}

}  // namespace lockstep
