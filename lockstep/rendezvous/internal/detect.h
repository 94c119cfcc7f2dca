// detect_cluster() for a caller who knows part of the answer already.
#pragma once

#include <atomic>
#include <optional>

#include "lockstep/rendezvous/rendezvous.h"

namespace lockstep::internal {

// Explicit options: they stand in for a rank or world size that the environment does not tell.
struct Known {
  std::optional<int> rank{};
  std::optional<int> world_size{};
};

Cluster detect(const Known& known);

// Whether this process has logged that nothing is set and it is a world of one.
std::atomic<bool>& told_alone();

// A port below the ephemeral range, the same for everyone with the same text.
int port_of_job(const std::string& job);

}  // namespace lockstep::internal
