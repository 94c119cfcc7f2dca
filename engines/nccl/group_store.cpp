#include "engines/nccl/group_store.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {

void GroupStore::set(const std::string& key, const std::string& value) const {
  if (host_->kv_set(host_->context, key.c_str(), value.data(), value.size()) != LOCKSTEP_OK)
    base::raise(ErrorKind::kSystem, base::cat("the group's store did not take \"", key, "\""),
                ErrorFamily::kBackend);
}

std::optional<std::string> GroupStore::get(const std::string& key, std::int64_t deadline_ns) const {
  std::string value(1024, '\0');
  for (;;) {
    std::size_t length = 0;
    const auto status =
        host_->kv_get(host_->context, key.c_str(), value.data(), value.size(), &length, deadline_ns);
    if (status == LOCKSTEP_TIMEOUT) return std::nullopt;
    if (status == LOCKSTEP_PEER_LOST)
      base::raise(ErrorKind::kPeerLost, "another rank could not join", ErrorFamily::kBackend);
    if (status != LOCKSTEP_OK)
      base::raise(ErrorKind::kSystem, base::cat("the group's store did not give \"", key, "\""),
                  ErrorFamily::kBackend);
    const bool whole = length <= value.size();
    value.resize(length);
    if (whole) return value;
  }
}

std::optional<std::string> GroupStore::look(const std::string& key) const noexcept {
  try {
    return get(key, 0);
  } catch (...) {
    return std::nullopt;
  }
}

void GroupStore::log(int level, const std::string& text) const noexcept {
  if (host_->log != nullptr) host_->log(host_->context, level, text.c_str());
}

}  // namespace lockstep::nccl_plugin
