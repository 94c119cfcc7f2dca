// Opens the TcpStore of a world: who serves it, who may join, and under which prefix its keys are.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/store/store.h"

namespace lockstep::internal {

struct MasterAddress {
  std::string host;
  int port = 0;
  std::optional<int> rank{};        // unset: one of an open number of clients
  std::optional<int> world_size{};  // unset: open
  Milliseconds timeout = kDefaultStoreTimeout;
};

// Rank 0 serves, unless TORCHELASTIC_USE_AGENT_STORE says that the launcher does. The secret is asked for
// when one is configured, except of torchrun's store, which cannot answer. Raises kUsage when the host is a
// multicast address, or is beyond loopback with neither a secret nor LOCKSTEP_INSECURE=1, on every rank
// alike; otherwise as TcpStore::open.
std::shared_ptr<Store> open_tcp(const MasterAddress& place);

// torch had a second server; logs, for who asks for it, that there is only one.
void say_one_server(const std::string& asked);

}  // namespace lockstep::internal
