#include "lockstep/group/call_log.h"

#include <memory>
#include <mutex>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/call_report.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/internal/worlds.h"

namespace lockstep {
namespace {

// Leaked on purpose: calls are made while static objects are being destroyed.
struct Logger {
  std::mutex mutex;
  std::shared_ptr<const CallLogger> logger;  // guarded by mutex; called outside of it
};

Logger& instance() {
  static auto& made = *new Logger;
  return made;
}

std::shared_ptr<const CallLogger> current_logger() {
  const std::lock_guard lock(instance().mutex);
  return instance().logger;
}

std::string group_text(const CallRecord& record) {
  std::string text = base::cat("group \"", record.group, "\"");
  if (!record.backend.empty()) text += base::cat(" over ", record.backend);
  if (record.group_rank && record.group_size)
    text += base::cat(", rank ", *record.group_rank, " of ", *record.group_size);
  else
    text += ", not a member";
  if (record.rank && record.world_size)
    text += base::cat(" (rank ", *record.rank, " of ", *record.world_size, " in the world)");
  return text;
}

CallRecord record_of(const internal::CallReport& report) {
  CallRecord record{.function = report.function};
  char where[internal::kWhereCapacity];
  internal::write_where(report.where, where);
  record.where = where;
  record.duration_ms = report.duration_ms;
  record.failure = report.failure;
  const Group root = internal::current_worlds().group();
  const ProcessGroup* const group = report.group != nullptr ? report.group : root.get();
  const auto* const ours = dynamic_cast<const internal::GroupBase*>(group);
  if (ours != nullptr && ours->world()) {
    record.rank = ours->world()->rank;
    record.world_size = ours->world()->size;
  } else if (root) {  // a non-member's handle does not know its world
    record.rank = root->rank();
    record.world_size = root->size();
  }
  if (group == nullptr) return record;
  record.group = group->name();
  if (group->rank() < 0) return record;  // a non-member's handle
  record.group_rank = group->rank();
  record.group_size = group->size();
  record.backend = group->backend();
  return record;
}

}  // namespace

void set_call_logger(CallLogger logger) {
  auto next = logger ? std::make_shared<const CallLogger>(std::move(logger)) : nullptr;
  const std::lock_guard lock(instance().mutex);
  instance().logger.swap(next);
}

std::string to_text(const CallRecord& record) {
  std::string text = base::cat(record.function, record.failure != nullptr ? " failed" : " ended well");
  if (record.duration_ms) text += base::cat(" after ", *record.duration_ms, " ms");
  text += ": ";
  if (!record.group.empty()) text += group_text(record) + ", ";
  text += base::cat("called at ", record.where);
  if (record.failure != nullptr) text += base::cat(": ", record.failure->message);
  return text;
}

namespace internal {

void report_call(const CallReport& report) noexcept {
  try {
    const auto logger = current_logger();
    if (!logger && !base::log_enabled(LogLevel::kDebug)) return;
    const CallRecord record = record_of(report);
    if (logger) return (*logger)(record);
    base::log(LogLevel::kDebug, to_text(record));
  } catch (...) {
    base::log(LogLevel::kError, base::cat("the call logger threw: ", base::current_failure().message));
  }
}

}  // namespace internal
}  // namespace lockstep
