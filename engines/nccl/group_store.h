// The key-value space of a communicator, as C++. Calls go to the job's store and take as long as a request to it: never on
// a path that must not block. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::nccl_plugin {

class GroupStore {
 public:
  explicit GroupStore(const lockstep_host* host) : host_(host) {}

  // Raises kSystem when the store cannot be reached.
  void set(const std::string& key, const std::string& value) const;
  // Waits for the key until the deadline; nothing then. Raises kPeerLost when another rank could not join, kSystem.
  std::optional<std::string> get(const std::string& key, std::int64_t deadline_ns) const;
  // What is there now. No store, no key: nothing.
  std::optional<std::string> look(const std::string& key) const noexcept;
  void log(int level, const std::string& text) const noexcept;
  const lockstep_host& host() const { return *host_; }

 private:
  const lockstep_host* host_;
};

}  // namespace lockstep::nccl_plugin
