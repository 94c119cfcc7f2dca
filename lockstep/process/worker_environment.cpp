#include "lockstep/process/worker_environment.h"

#include <unistd.h>

#include <algorithm>

#include "lockstep/base/environment.h"
#include "lockstep/base/text.h"

namespace lockstep {

EnvironmentList worker_environment(const WorkerPlace& place, const JobAddress& job) {
  EnvironmentList list;
  const auto set = [&list](Var var, const auto& value) { list.emplace_back(name_of(var), cat(value)); };
  set(Var::kRank, place.rank);
  set(Var::kWorldSize, place.world_size);
  set(Var::kLocalRank, place.local_rank);
  set(Var::kLocalWorldSize, place.local_world_size);
  set(Var::kGroupRank, place.node_rank);
  set(Var::kGroupWorldSize, place.n_nodes);
  // One role per job, so the ranks within it are those of the world.
  set(Var::kRoleRank, place.rank);
  set(Var::kRoleWorldSize, place.world_size);
  set(Var::kRoleName, place.role);
  set(Var::kMasterAddr, job.master_addr);
  set(Var::kMasterPort, job.master_port);
  set(Var::kElasticUseAgentStore, "True");
  set(Var::kElasticRunId, job.run_id);
  set(Var::kElasticRestartCount, 0);
  set(Var::kElasticMaxRestarts, 0);
  if (!environment(Var::kNcclAsyncErrorHandling)) set(Var::kNcclAsyncErrorHandling, 1);
  set(Var::kLockstepLauncher, job.launcher_pid);
  if (job.secret_fd >= 0) set(Var::kLockstepSecretFd, job.secret_fd);
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
  for (const auto& [name, value] : changes) lines.push_back(cat(name, "=", value));
  return lines;
}

}  // namespace lockstep
