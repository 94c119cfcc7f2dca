// Records of calls, for telemetry: every call that failed, and the duration of slow calls.
//
//   set_call_logger([](const CallRecord& record) { my_telemetry.add(record.function, record.duration_ms, ...); });
//
// Failures: every collective, message and call of world.h and groups.h that raises, on the rank where it
// does. A failure of an asynchronous operation is reported to a completion hook (process_group.h). Timed,
// also when they succeed: init_process_group, create_group, destroy_process_group, new_group and its
// relatives. Without a logger the records are log lines of level debug.
// Thread safety: every function may be called from any thread; the logger is called by the thread that made
// the call.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {

struct CallRecord {
  const char* function;             // "all_reduce"; static
  std::string group;                // its name; "" when there is none
  std::string backend;              // "host", "cpu:host,meta:fake"; "" without a group or when not a member
  std::optional<int> group_rank{};  // both unset when there is none or this rank is not a member
  std::optional<int> group_size{};
  std::optional<int> rank{};  // in the group's world, without a group in the default one
  std::optional<int> world_size{};
  std::string where;                    // "train.cpp:42"
  std::optional<double> duration_ms{};  // of timed calls
  const Failure* failure = nullptr;     // null when the call succeeded; valid during the logger's call
};
using CallLogger = std::function<void(const CallRecord&)>;

// Replaces the logger; null restores log lines. It must not block, and what it throws is logged. Calls in
// progress on other threads may still reach the previous one.
void set_call_logger(CallLogger logger);

// "all_reduce failed: group "0" over host, rank 1 of 4 (rank 1 of 8 in the world), called at train.cpp:42:
// <message>"
std::string to_text(const CallRecord& record);

}  // namespace lockstep
