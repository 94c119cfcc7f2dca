#include "lockstep/group/detail/group_base.h"

#include <algorithm>
#include <string_view>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/internal/backend_parts.h"

namespace lockstep::internal {
namespace {

c10::DeviceType device_type(const std::string& name) {
  for (int type = 0; type < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++type) {
    const auto known = static_cast<c10::DeviceType>(type);
    if (c10::isValidDeviceType(known) && c10::DeviceTypeName(known, /*lower_case=*/true) == name)
      return known;
  }
  base::raise(ErrorKind::kUsage, base::cat("\"", name, "\" is not a device type of torch"));
}

}  // namespace

GroupBase::GroupBase(GroupIdentity identity) : identity_(std::move(identity)) {
  for (const auto& name : identity_.devices) devices_.set(static_cast<std::size_t>(device_type(name)));
}

std::string GroupBase::desc() const {
  const std::lock_guard lock(shared().mutex);
  return shared().desc;
}

void GroupBase::set_desc(std::string desc) {
  const std::lock_guard lock(shared().mutex);
  shared().desc = std::move(desc);
}

void GroupBase::set_timeout(Milliseconds timeout) {
  if (timeout <= Milliseconds::zero()) {
    base::raise(ErrorKind::kUsage, base::cat("set_timeout of group \"", name(), "\": ", timeout.count(),
                                             " ms; it must be positive"));
  }
  shared().timeout = timeout;
}

void GroupBase::register_on_completion_hook(CompletionHook hook) {
  if (!hook) base::raise(ErrorKind::kUsage, "register_on_completion_hook: no function given");
  const std::lock_guard lock(shared().mutex);
  if (shared().has_hook) {
    base::raise(ErrorKind::kUsage,
                base::cat("register_on_completion_hook: group \"", name(), "\" has one already"));
  }
  shared().hook = std::move(hook);
  // After the hook, and sequentially consistent: who loads it with acquire finds the hook.
  shared().has_hook = true;
}

// Counted as an operation: otherwise this rank's numbers would be one behind from now on, and every later
// call would seem to differ. The text is added to the next call's line, so that the other ranks' message says
// what happened here.
void GroupBase::refused(const OperationRequest& request) {
  const auto type = request.ended.type;
  if (type == OpType::kSend || type == OpType::kRecv || type == OpType::kRecvAnySource) return;
  shared().sequence.fetch_add(1, std::memory_order_relaxed);
  const std::string_view file = request.where.file_name();
  const std::lock_guard lock(shared().mutex);
  shared().refusal = base::cat(request.name, " at ", file.substr(file.rfind('/') + 1), ":",
                               request.where.line());  // npos + 1 is 0
  shared().has_refusal = true;
}

void GroupBase::add_refusal(char* where) const {
  const std::lock_guard lock(shared().mutex);
  if (!shared().has_refusal.exchange(false)) return;
  const auto text = base::cat(where, " (after it refused ", shared().refusal, ")");
  // The end says more than the beginning of a long path.
  const auto skipped = text.size() < kWhereCapacity ? 0 : text.size() - kWhereCapacity + 1;
  text.copy(where, kWhereCapacity - 1, skipped);
  where[text.size() - skipped] = '\0';
}

std::string GroupBase::backend_config() const {
  std::string config;
  for (const auto& device : identity_.devices)
    config += base::cat(config.empty() ? "" : ",", device, ":", backend());
  return config;
}

}  // namespace lockstep::internal

namespace lockstep {

std::shared_ptr<Backend> get_backend_impl(const Group& group, const std::string& device) {
  const auto chosen = internal::still_there(group, "get_backend_impl");
  if (!chosen->is_member())
    base::raise(ErrorKind::kUsage, "get_backend_impl: this rank is not a member of the group");
  const internal::GroupBase* const part = chosen->for_device(internal::device_type(device));
  if (part == nullptr) {
    base::raise(ErrorKind::kUsage,
                base::cat("get_backend_impl: group \"", chosen->name(), "\" has no back end for ", device,
                          "; it has ", chosen->backend_config()));
  }
  const comm::Engine* const engine = part->engine();
  const auto comm = engine == nullptr ? nullptr : part->communicator(*engine);
  if (auto backend = comm ? internal::backend_of(*comm, *engine) : nullptr) return backend;
  base::raise(ErrorKind::kUnsupported,
              base::cat("get_backend_impl: back end \"", part->backend(), "\" of group \"", chosen->name(),
                        "\" is an engine; only back ends registered as a class have an object"));
}

}  // namespace lockstep
