#include "lockstep/process/worker_environment.h"

#include <unistd.h>

#include <algorithm>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::process {

EnvironmentList worker_environment(const WorkerPlace& place, const JobAddress& job) {
  EnvironmentList list;
  const auto set = [&list](base::EnvVar var, const auto& value) {
    list.emplace_back(name_of(var), base::cat(value));
  };
  set(base::EnvVar::kRank, place.rank);
  set(base::EnvVar::kWorldSize, place.world_size);
  set(base::EnvVar::kLocalRank, place.local_rank);
  set(base::EnvVar::kLocalWorldSize, place.local_world_size);
  set(base::EnvVar::kGroupRank, place.node_rank);
  set(base::EnvVar::kGroupWorldSize, place.n_nodes);
  // One role per job, so the ranks within it are those of the world.
  set(base::EnvVar::kRoleRank, place.rank);
  set(base::EnvVar::kRoleWorldSize, place.world_size);
  set(base::EnvVar::kRoleName, place.role);
  set(base::EnvVar::kMasterAddr, job.master_addr);
  set(base::EnvVar::kMasterPort, job.master_port);
  set(base::EnvVar::kElasticUseAgentStore, "True");
  set(base::EnvVar::kElasticRunId, job.run_id);
  set(base::EnvVar::kElasticRestartCount, 0);
  set(base::EnvVar::kElasticMaxRestarts, 0);
  if (!base::environment(base::EnvVar::kNcclAsyncErrorHandling))
    set(base::EnvVar::kNcclAsyncErrorHandling, 1);
  set(base::EnvVar::kLockstepLauncher, job.launcher_pid);
  if (job.secret_fd) set(base::EnvVar::kLockstepSecretFd, *job.secret_fd);
  return list;
}

std::vector<std::string> environment_with(const EnvironmentList& changes) {
  std::vector<std::string> lines;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string line = *entry;
    const std::string name = line.substr(0, line.find('='));
    const auto same = [&name](const auto& change) { return change.first == name; };
    if (std::none_of(changes.begin(), changes.end(), same)) lines.push_back(line);
  }
  for (const auto& [name, value] : changes) lines.push_back(base::cat(name, "=", value));
  return lines;
}

}  // namespace lockstep::process
