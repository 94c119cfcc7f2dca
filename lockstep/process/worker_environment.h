// The environment of a worker process: torchrun's variables, and lockstep's own for the secret. Used by the
// launcher and by spawn, so that init_process_group() needs no argument in either.
// Thread safety: values, no shared state; environment_with() not concurrently with setenv.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::process {

// A worker's position in its job.
struct WorkerPlace {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;
  int node_rank = 0, n_nodes = 1;
  std::string role = "default";
};

// What all workers of a job on this host share.
struct JobAddress {
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  std::string run_id;
  int launcher_pid = 0;
  std::optional<int> secret_fd{};  // unset: no secret
};

using EnvironmentList = std::vector<std::pair<std::string, std::string>>;

// The variables to set for one worker.
EnvironmentList worker_environment(const WorkerPlace& place, const JobAddress& job);

// This process's environment overridden by `changes`, as "NAME=value" strings for exec. Variables of other
// launchers are kept: torchrun's names take precedence.
std::vector<std::string> environment_with(const EnvironmentList& changes);

}  // namespace lockstep::process
