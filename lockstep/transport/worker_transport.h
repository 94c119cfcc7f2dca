// The transport of real jobs: shared memory between the processes of a host, TCP across hosts.
//
// On one host a message is copied once by its sender: small parts into a ring of the receiver's inbox, large
// ones into the sender's heap, of which the receiver gets views (64-byte aligned, and it may modify them).
// Views may outlive both transports and the sender's process. Sending never blocks, not even the first time:
// connections are established by the threads that poll or wait, on both sides. The first message establishes
// a connection, which carries one direction.
// Thread safety: as Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/net/secret.h"
#include "lockstep/transport/transport.h"

namespace lockstep::transport {

enum class Route : std::uint8_t {
  kAuto,  // shared memory with workers of the same host, TCP with others
  kTcp,   // TCP with all workers
};

struct WorkerTransportOptions {
  WorkerId id = 0;
  std::string name{};
  // Both sides of every connection prove that they know it. Without one, shared memory is only for processes
  // of the same user, and TCP only on loopback unless `insecure`.
  std::optional<JobSecret> secret{};
  Route route = Route::kAuto;
  // The address at which workers of other hosts reach this one. Empty: TCP only where everything uses it
  // (kTcp), on 127.0.0.1.
  std::string bind_host{};
  bool insecure = false;  // TCP beyond loopback without a secret: LOCKSTEP_INSECURE=1
  std::uint64_t max_message_bytes = std::uint64_t{8} << 30;
};

// Raises kUsage for a TCP address beyond loopback without a secret, kResource and kSystem.
std::unique_ptr<Transport> open_worker_transport(WorkerTransportOptions options);

}  // namespace lockstep::transport
