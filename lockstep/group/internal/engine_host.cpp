#include "lockstep/group/detail/engine_host.h"
#include "lockstep/base/detail/timeout.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/engine/engine.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep::internal {
namespace {

// How long a get waits before it looks whether a rank has given up.
constexpr Milliseconds kGiveUpSlice{250};
// Where launchers and spawn publish how a rank ended.
constexpr std::string_view kExitKey = "lockstep/exit/";

// Engines get a status; the message goes to the log.
lockstep_status report(const char* what, const char* key) noexcept {
  const Failure failure = base::current_failure();
  if (base::log_enabled(LogLevel::kDebug)) {
    lockstep::base::log(LogLevel::kDebug,
                        base::cat(what, " of engine key \"", key, "\" failed: ", failure.message));
  }
  return comm::status_of(failure.kind);
}

}  // namespace

StoreHandles StoreHandles::open(Store& store) {
  return {.sets = store.clone(), .gets = store.clone(), .checks = store.clone()};
}

StoreHandles StoreHandles::under(const std::string& prefix) const {
  return {.sets = std::make_shared<PrefixStore>(prefix, sets),
          .gets = std::make_shared<PrefixStore>(prefix, gets),
          .checks = std::make_shared<PrefixStore>(prefix, checks)};
}

// In slices, since a store's wait cannot be interrupted: in between it is checked whether some rank has
// published that it cannot join, which ends the wait of all.
bool await_keys(Store& store, const std::vector<std::string>& keys, Store& failures,
                const std::string& failed_key, Deadline deadline,
                const std::function<std::string()>& waiting) {
  const std::string failed[] = {failed_key};
  base::SlowWait slow(deadline);
  while (!deadline.expired()) {
    try {
      store.wait(keys, std::min(base::time_left(deadline), kGiveUpSlice));
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    if (waiting) slow.say_if_due(waiting);
    if (failures.check(failed)) base::raise(ErrorKind::kPeerLost, "another rank could not join");
  }
  return store.check(keys);
}

EngineHost::Stores EngineHost::Stores::clone(Store& engine, Store& root, Store& group) {
  return {.engine = StoreHandles::open(engine), .root = root.clone(), .group = group.clone()};
}

EngineHost::EngineHost(Stores stores, std::string failed_key, std::vector<int> launch_ranks)
    : stores_(std::move(stores)),
      failed_key_(std::move(failed_key)),
      launch_ranks_(std::move(launch_ranks)),
      table_{.struct_size = sizeof(lockstep_host),
             .context = this,
             .log = log,
             .kv_set = kv_set,
             .kv_get = kv_get} {}

EngineHost::~EngineHost() = default;

// Keys of an engine that begin with "/" are the job's, not the group's.
// Without the leading "/". The launcher knows ranks by the numbers it gave them; nothing for the end of one
// that it does not know.
std::optional<std::string> EngineHost::root_key(const char* key) const {
  const std::string_view text = key + 1;
  if (launch_ranks_.empty() || !text.starts_with(kExitKey)) return std::string(text);
  const std::string_view digits = text.substr(kExitKey.size());
  std::size_t rank = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size() || rank >= launch_ranks_.size())
    return std::string(text);
  if (launch_ranks_[rank] < 0) return std::nullopt;
  return base::cat(kExitKey, launch_ranks_[rank]);
}

void EngineHost::log(void*, int level, const char* text) {
  constexpr LogLevel kLevels[] = {LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo, LogLevel::kDebug};
  lockstep::base::log(kLevels[std::clamp(level, 0, 3)], text == nullptr ? "" : text);
}

lockstep_status EngineHost::kv_set(void* context, const char* key, const void* value, size_t length) {
  auto* self = static_cast<EngineHost*>(context);
  try {
    const std::span bytes(static_cast<const std::uint8_t*>(value), length);
    if (key[0] == '/') {
      const auto name = self->root_key(key);
      if (!name) return LOCKSTEP_UNSUPPORTED;
      self->stores_.root->set(*name, bytes);
    } else {
      self->stores_.engine.sets->set(key, bytes);
    }
    return LOCKSTEP_OK;
  } catch (...) {
    return report("set", key);
  }
}

lockstep_status EngineHost::kv_get(void* context, const char* key, void* value, size_t capacity,
                                   size_t* length, int64_t deadline_ns) {
  auto* self = static_cast<EngineHost*>(context);
  try {
    const bool rooted = key[0] == '/';
    // A launcher that publishes how ranks ended sets this variable for them.
    if (rooted && std::string_view(key + 1).starts_with(kExitKey) &&
        !base::environment(base::EnvVar::kLockstepLauncher))
      return LOCKSTEP_UNSUPPORTED;
    Store& store = rooted ? *self->stores_.root : *self->stores_.engine.gets;
    const auto name = rooted ? self->root_key(key) : key;
    if (!name) return LOCKSTEP_UNSUPPORTED;
    const auto deadline = Deadline::from_monotonic_ns(deadline_ns);
    if (!await_keys(store, {*name}, *self->stores_.group, self->failed_key_, deadline))
      return LOCKSTEP_TIMEOUT;
    const Bytes bytes = store.get(*name);
    *length = bytes.size();
    if (const size_t n = std::min(capacity, bytes.size()); n > 0) std::memcpy(value, bytes.data(), n);
    return LOCKSTEP_OK;
  } catch (...) {
    return report("get", key);
  }
}

}  // namespace lockstep::internal
