#include "lockstep/group/internal/store_host.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/engine/engine.h"

namespace lockstep::internal {
namespace {

// How long a get waits before it looks whether a rank has given up.
constexpr Milliseconds kGiveUpSlice{250};

// Engines get a status; the words go to the log.
lockstep_status report(const char* what, const char* key) noexcept {
  const Failure failure = current_failure();
  if (log_enabled(LogLevel::kDebug)) {
    lockstep::log(LogLevel::kDebug, cat(what, " of engine key \"", key, "\" failed: ", failure.message));
  }
  return comm::status_of(failure.kind);
}

}  // namespace

StoreHost::StoreHost(const Stores& stores, std::string failed_key)
    : sets_(stores.engine.clone()),
      gets_(stores.engine.clone()),
      root_(stores.root.clone()),
      group_(stores.group.clone()),
      failed_key_(std::move(failed_key)),
      table_{.struct_size = sizeof(lockstep_host),
             .context = this,
             .log = log,
             .kv_set = kv_set,
             .kv_get = kv_get} {}

StoreHost::~StoreHost() = default;

// Waits for the key; false when the deadline passed first.
bool StoreHost::await(Store& store, const std::string& key, Deadline deadline) {
  const std::string keys[] = {key}, failed[] = {failed_key_};
  while (!deadline.expired()) {
    // A store takes zero for "for ever", so the time left is rounded up.
    const auto left = std::min(deadline, Deadline::after(kGiveUpSlice)).remaining();
    try {
      store.wait(keys, std::chrono::ceil<Milliseconds>(left) + Milliseconds(1));
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    if (group_->check(failed)) raise(ErrorKind::kPeerLost, "another rank could not join");
  }
  return store.check(keys);
}

void StoreHost::log(void*, int level, const char* text) {
  constexpr LogLevel kLevels[] = {LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo, LogLevel::kDebug};
  lockstep::log(kLevels[std::clamp(level, 0, 3)], text == nullptr ? "" : text);
}

lockstep_status StoreHost::kv_set(void* context, const char* key, const void* value, size_t length) {
  auto* self = static_cast<StoreHost*>(context);
  try {
    const std::span bytes(static_cast<const std::uint8_t*>(value), length);
    if (key[0] == '/') {
      self->root_->set(key + 1, bytes);
    } else {
      self->sets_->set(key, bytes);
    }
    return LOCKSTEP_OK;
  } catch (...) {
    return report("set", key);
  }
}

lockstep_status StoreHost::kv_get(void* context, const char* key, void* value, size_t capacity,
                                  size_t* length, int64_t deadline_ns) {
  auto* self = static_cast<StoreHost*>(context);
  try {
    Store& store = key[0] == '/' ? *self->root_ : *self->gets_;
    const std::string name = key[0] == '/' ? key + 1 : key;
    if (!self->await(store, name, Deadline::from_monotonic_ns(deadline_ns))) return LOCKSTEP_TIMEOUT;
    const Bytes bytes = store.get(name);
    *length = bytes.size();
    if (const size_t n = std::min(capacity, bytes.size()); n > 0) std::memcpy(value, bytes.data(), n);
    return LOCKSTEP_OK;
  } catch (...) {
    return report("get", key);
  }
}

}  // namespace lockstep::internal
