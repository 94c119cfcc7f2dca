// The source of the records of call_log.h. Also for collective/.
// Thread safety: any thread.
#pragma once

#include <chrono>
#include <optional>
#include <source_location>
#include <type_traits>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

struct CallReport {
  const char* function;
  const std::source_location& where;
  ProcessGroup* group = nullptr;  // null: none yet, or the whole world
  std::optional<double> duration_ms{};
  const Failure* failure = nullptr;
};
// Never throws. Cheap while no logger is set and the log level is above debug.
void report_call(const CallReport& report) noexcept;

// Runs `fn` as the call of that name, and reports its duration and its error. `fn` may return the group that
// the call concerns.
template <class Fn>
auto timed_call(const char* function, const std::source_location& where, ProcessGroup* group, const Fn& fn) {
  const auto started = std::chrono::steady_clock::now();
  const auto report = [&](ProcessGroup* about, const Failure* failure) {
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - started;
    report_call({.function = function,
                 .where = where,
                 .group = about,
                 .duration_ms = took.count(),
                 .failure = failure});
  };
  try {
    if constexpr (std::is_same_v<decltype(fn()), Group>) {
      Group made = fn();
      report(made.get(), nullptr);
      return made;
    } else if constexpr (std::is_void_v<decltype(fn())>) {
      fn();
      report(group, nullptr);
    } else {
      auto result = fn();
      report(group, nullptr);
      return result;
    }
  } catch (...) {
    const Failure failure = base::current_failure();
    report(group, &failure);
    throw;
  }
}

}  // namespace lockstep::internal
