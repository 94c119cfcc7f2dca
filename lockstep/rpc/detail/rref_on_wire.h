// An RRef inside a message.
// Thread safety: a value.
#pragma once

#include <cstdint>

#include "lockstep/rpc/worker.h"

namespace lockstep::rpc::internal {

// An RRef in flight from one worker to another; the sender is the parent.
struct RRefOnWire {
  std::uint64_t rref = 0;
  std::uint64_t fork = 0;
  WorkerId owner = 0;
};

}  // namespace lockstep::rpc::internal
