// How a master gets its server: where it listens, whether it may, and sharing between masters of one process.
#pragma once

#include <memory>
#include <string>

#include "lockstep/store/internal/tcp_server.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {

// Raises kUsage for options that contradict each other, kUnsupported for what there is not.
void check_options(const TcpStoreOptions& options);

// A server as the options ask, or with multi_tenant the one this process already has on that port. Raises
// kUsage when it would listen beyond loopback without a secret, DistNetworkError when the port is taken.
std::shared_ptr<TcpServer> start_master(const std::string& host, const TcpStoreOptions& options);

// Sleeps 1 to world_size milliseconds, a second at most: spreads the connections of a large job.
void stagger(int world_size);

}  // namespace lockstep::internal
