// The key-value space that lockstep lends to an engine, as local::meet() takes it. For engines whose ranks meet on one host.
// Thread safety: none; used by the thread that joins. The host outlives it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/local/meeting.h"

namespace lockstep::comm {

class HostStore final : public local::KeyValue {
 public:
  // `prefix`: of every key, where several meetings use one space.
  explicit HostStore(const lockstep_host& host, std::string prefix = "")
      : host_(host), prefix_(std::move(prefix)) {}

  void set(const std::string& key, std::span<const std::uint8_t> value) override {
    if (host_.kv_set(host_.context, (prefix_ + key).c_str(), value.data(), value.size()) == LOCKSTEP_OK)
      return;
    base::raise(ErrorKind::kSystem, "cannot publish this rank's address in the group's store",
                ErrorFamily::kBackend);
  }
  std::optional<Bytes> get(const std::string& key, Deadline deadline) override {
    // A meeting publishes one short address. A longer value is cut here, and decoding it then fails.
    std::uint8_t buffer[1024];
    std::size_t length = 0;
    const auto status = host_.kv_get(host_.context, (prefix_ + key).c_str(), buffer, sizeof buffer, &length,
                                     deadline.monotonic_ns());
    if (status == LOCKSTEP_OK) return Bytes(buffer, buffer + std::min(length, sizeof buffer));
    if (status == LOCKSTEP_TIMEOUT) return std::nullopt;
    if (status == LOCKSTEP_PEER_LOST)
      base::raise(ErrorKind::kPeerLost, "another rank could not join", ErrorFamily::kBackend);
    base::raise(ErrorKind::kSystem, base::cat("the group's store did not give \"", key, "\""),
                ErrorFamily::kBackend);
  }

 private:
  const lockstep_host& host_;
  const std::string prefix_;
};

}  // namespace lockstep::comm
