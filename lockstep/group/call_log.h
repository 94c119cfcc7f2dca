// Records of calls, for whoever collects them from a job: every call that failed, and how long the slow ones took.
//
//   set_call_logger([](const CallRecord& record) { my_telemetry.add(record.function, record.duration_ms, ...); });
//
// Failing: every collective, message and call of world.h and groups.h that raises, on the rank where it does. A failure
// of an asynchronous operation is a completion hook's to tell (process_group.h). Timed, also when they end well:
// init_process_group, destroy_process_group, new_group and its relatives.
// Without a logger the records are log lines of level debug.
// Thread safety: every function may be called from any thread; the logger is called by the thread that made the call.
#pragma once

#include <functional>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {

struct CallRecord {
  const char* function;  // "all_reduce"; static
  std::string group;     // its name; "" when there is none
  std::string backend;   // "host", "cpu:host,meta:fake"; "" when there is no group or this rank is no member
  int group_rank = -1;   // -1, both, when there is none or this rank is no member
  int group_size = -1;
  int rank = -1;  // in the world; -1, both, outside of one
  int world_size = -1;
  std::string where;                 // "train.cpp:42"
  double duration_ms = -1;           // of timed calls; negative: not timed
  const Failure* failure = nullptr;  // null when the call ended well; valid during the logger's call
};
using CallLogger = std::function<void(const CallRecord&)>;

// Replaces the logger; null: log lines again. It must not block, and what it throws is logged. Calls that are under way
// on other threads may still reach the one before.
void set_call_logger(CallLogger logger);

// "all_reduce failed: group "0" over host, rank 1 of 4 (rank 1 of 8 in the world), called at train.cpp:42: <words>"
std::string to_text(const CallRecord& record);

}  // namespace lockstep
