// Who started this process, and which place it has: one function per launcher, asked in order.
#include <unistd.h>

#include <limits>
#include <optional>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/rendezvous/internal/detect.h"
#include "lockstep/rendezvous/internal/nodelist.h"
#include "lockstep/rendezvous/internal/url.h"

namespace lockstep {
namespace internal {
namespace {

constexpr const char* kHere = "127.0.0.1";

// The variable as a number not below `low`, if it is set.
std::optional<int> number(base::EnvVar var, int low = 0) {
  const auto text = base::environment(var);
  if (!text) return std::nullopt;
  return static_cast<int>(parse_number(base::cat("environment variable ", name_of(var)), *text, low,
                                       std::numeric_limits<int>::max()));
}

std::optional<int> port_number(base::EnvVar var) {
  const auto text = base::environment(var);
  if (!text) return std::nullopt;
  return static_cast<int>(parse_number(base::cat("environment variable ", name_of(var)), *text, 0, 65535));
}

bool is_set(base::EnvVar var) {
  return base::environment(var).has_value();
}

[[noreturn]] void raise_missing(base::EnvVar missing, base::EnvVar given) {
  base::raise(ErrorKind::kUsage,
              base::cat("environment variable ", name_of(missing), " is not set, but ", name_of(given), "=",
                        base::environment(given).value_or(""), " is"));
}

// Rank and size from a pair of variables; either may be known from elsewhere, but not neither.
void read_pair(Cluster& cluster, base::EnvVar rank, base::EnvVar size, const Known& known) {
  cluster.rank = number(rank);
  cluster.world_size = number(size, 1);
  if (!cluster.rank && !known.rank) raise_missing(rank, size);
  if (!cluster.world_size && !known.world_size) raise_missing(size, rank);
  const int last = (known.world_size ? *known.world_size : *cluster.world_size) - 1;
  if (!known.rank && *cluster.rank > last) {
    base::raise(ErrorKind::kUsage, base::cat("environment variable ", name_of(rank), " is ", *cluster.rank,
                                             ", but the ranks of a world of ", last + 1, " are 0 to ", last));
  }
  cluster.details = base::cat("rank from ", name_of(rank), ", world size from ", name_of(size));
}

void read_master(Cluster& cluster) {
  cluster.master_addr = base::environment(base::EnvVar::kMasterAddr).value_or("");
  cluster.master_port = port_number(base::EnvVar::kMasterPort);
  if (cluster.master_addr.empty()) return;
  cluster.details +=
      base::cat(cluster.details.empty() ? "" : ", ", "address from ", name_of(base::EnvVar::kMasterAddr));
}

// What tells this job from others on the same host, for launchers that name no port.
std::string mpi_job() {
  for (const base::EnvVar var :
       {base::EnvVar::kPmixNamespace, base::EnvVar::kOmpiJobId, base::EnvVar::kSlurmJobId}) {
    if (const auto text = base::environment(var)) return base::cat(name_of(var), "=", *text);
  }
  return base::cat("parent process ", ::getppid());  // the launcher's local daemon starts all ranks of a host
}

// Ranks of one host need no address from the user: the loopback interface, and a port made of the job's name.
void fill_master(Cluster& cluster, const std::string& host, const std::string& job) {
  if (cluster.master_addr.empty() && !host.empty()) {
    cluster.master_addr = host;
    cluster.details +=
        host == kHere ? ", all ranks on this host" : ", address from the first host of the job";
  }
  if (cluster.master_addr.empty() || cluster.master_port) return;
  cluster.master_port = port_of_job(job);
  cluster.details += base::cat(", port made of ", job);
}

bool on_one_host(const Cluster& cluster) {
  return cluster.world_size && cluster.local_world_size == cluster.world_size;
}

std::optional<Cluster> torchrun(const Known& known) {
  if (!is_set(base::EnvVar::kRank) && !is_set(base::EnvVar::kWorldSize)) return std::nullopt;
  // PMIx gives no size; a user who adds WORLD_SIZE means the PMIx rank.
  if (!is_set(base::EnvVar::kRank) && !known.rank && is_set(base::EnvVar::kPmixRank)) return std::nullopt;
  Cluster cluster{.source = "torchrun"};
  read_pair(cluster, base::EnvVar::kRank, base::EnvVar::kWorldSize, known);
  cluster.local_rank = number(base::EnvVar::kLocalRank);
  cluster.local_world_size = number(base::EnvVar::kLocalWorldSize, 1);
  cluster.node_rank = number(base::EnvVar::kGroupRank);
  cluster.n_nodes = number(base::EnvVar::kGroupWorldSize, 1);
  cluster.agent_store = base::environment_flag(base::EnvVar::kElasticUseAgentStore);
  read_master(cluster);
  return cluster;
}

// The presets are torchrun's flags, not a rank: with several ranks per host they say too little by
// themselves.
std::optional<Cluster> pet(const Known& known) {
  if (!is_set(base::EnvVar::kPetNnodes) && !is_set(base::EnvVar::kPetNodeRank)) return std::nullopt;
  Cluster cluster{.source = "PET"};
  cluster.n_nodes = number(base::EnvVar::kPetNnodes, 1);
  cluster.node_rank = number(base::EnvVar::kPetNodeRank);
  if (!cluster.n_nodes) raise_missing(base::EnvVar::kPetNnodes, base::EnvVar::kPetNodeRank);
  if (!cluster.node_rank && *cluster.n_nodes > 1 && !known.rank)
    raise_missing(base::EnvVar::kPetNodeRank, base::EnvVar::kPetNnodes);
  const int node_rank = cluster.node_rank.value_or(0);
  const int local_world_size = number(base::EnvVar::kPetNprocPerNode, 1).value_or(1);
  cluster.local_rank = number(base::EnvVar::kLocalRank);
  if (!cluster.local_rank && local_world_size > 1 && !known.rank) {
    raise_missing(base::EnvVar::kLocalRank, base::EnvVar::kPetNprocPerNode);
  }
  const int local_rank = cluster.local_rank.value_or(0);
  cluster.node_rank = node_rank;
  cluster.local_rank = local_rank;
  cluster.local_world_size = local_world_size;
  cluster.rank = node_rank * local_world_size + local_rank;
  cluster.world_size = *cluster.n_nodes * local_world_size;
  cluster.details = "rank and world size from PET_NODE_RANK, PET_NNODES and PET_NPROC_PER_NODE";
  read_master(cluster);
  if (const auto text = base::environment(base::EnvVar::kPetMasterAddr)) cluster.master_addr = *text;
  if (is_set(base::EnvVar::kPetMasterPort)) cluster.master_port = port_number(base::EnvVar::kPetMasterPort);
  return cluster;
}

std::optional<Cluster> open_mpi(const Known& known) {
  if (!is_set(base::EnvVar::kOmpiRank) && !is_set(base::EnvVar::kOmpiSize)) return std::nullopt;
  Cluster cluster{.source = "Open MPI"};
  read_pair(cluster, base::EnvVar::kOmpiRank, base::EnvVar::kOmpiSize, known);
  cluster.local_rank = number(base::EnvVar::kOmpiLocalRank);
  cluster.local_world_size = number(base::EnvVar::kOmpiLocalSize, 1);
  read_master(cluster);
  fill_master(cluster, on_one_host(cluster) ? kHere : "", mpi_job());
  return cluster;
}

std::optional<Cluster> pmi(const Known& known) {
  if (!is_set(base::EnvVar::kPmiRank) && !is_set(base::EnvVar::kPmiSize)) return std::nullopt;
  // srun can set these too, and tells more as Slurm; mpiexec inside a Slurm job is known by its local rank.
  if (is_set(base::EnvVar::kSlurmProcId) && !is_set(base::EnvVar::kMpiLocalRankId)) return std::nullopt;
  Cluster cluster{.source = "PMI"};
  read_pair(cluster, base::EnvVar::kPmiRank, base::EnvVar::kPmiSize, known);
  cluster.local_rank = number(base::EnvVar::kMpiLocalRankId);
  cluster.local_world_size = number(base::EnvVar::kMpiLocalNRanks, 1);
  read_master(cluster);
  fill_master(cluster, on_one_host(cluster) ? kHere : "", mpi_job());
  return cluster;
}

std::optional<Cluster> pmix(const Known& known) {
  if (!is_set(base::EnvVar::kPmixRank) || is_set(base::EnvVar::kSlurmProcId)) return std::nullopt;
  Cluster cluster{.source = "PMIx"};
  read_pair(cluster, base::EnvVar::kPmixRank, base::EnvVar::kWorldSize, known);
  cluster.local_rank = number(base::EnvVar::kLocalRank);
  cluster.local_world_size = number(base::EnvVar::kLocalWorldSize, 1);
  read_master(cluster);
  fill_master(cluster, on_one_host(cluster) ? kHere : "", mpi_job());
  return cluster;
}

// The only one of these launchers that lists the hosts: the first is the master where the user names none.
std::optional<Cluster> slurm(const Known& known) {
  if (!is_set(base::EnvVar::kSlurmProcId))
    return std::nullopt;  // salloc's shell has SLURM_NTASKS, but no rank
  Cluster cluster{.source = "Slurm"};
  read_pair(cluster, base::EnvVar::kSlurmProcId, base::EnvVar::kSlurmNTasks, known);
  const base::EnvVar list = is_set(base::EnvVar::kSlurmStepNodelist) ? base::EnvVar::kSlurmStepNodelist
                                                                     : base::EnvVar::kSlurmNodelist;
  std::vector<std::string> hosts;
  if (const auto text = base::environment(list)) hosts = expand_nodelist(*text);
  cluster.local_rank = number(base::EnvVar::kSlurmLocalId);
  cluster.node_rank = number(base::EnvVar::kSlurmNodeId);
  cluster.n_nodes = number(base::EnvVar::kSlurmStepNumNodes, 1);
  if (!cluster.n_nodes && !hosts.empty()) cluster.n_nodes = static_cast<int>(hosts.size());
  cluster.local_world_size =
      cluster.n_nodes == 1 ? cluster.world_size : number(base::EnvVar::kSlurmNTasksPerNode, 1);
  read_master(cluster);
  const std::string host = cluster.n_nodes == 1 ? kHere : hosts.empty() ? "" : hosts.front();
  fill_master(cluster, host,
              base::cat(name_of(base::EnvVar::kSlurmJobId), "=",
                        base::environment(base::EnvVar::kSlurmJobId).value_or(""), ".",
                        base::environment(base::EnvVar::kSlurmStepId).value_or("")));
  if (cluster.world_size.value_or(1) > 1 && !is_set(base::EnvVar::kSlurmStepNodelist) &&
      !is_set(base::EnvVar::kSlurmStepNumNodes)) {
    base::log(LogLevel::kWarn,
              "this looks like the shell of a Slurm batch job, not like a task of srun: if it waits for "
              "other ranks, start it with srun");
  }
  return cluster;
}

}  // namespace

int port_of_job(const std::string& job) {
  // FNV-1a, to 20000..32767: above most services, below the ports the kernel hands out by itself.
  std::uint32_t hash = 2166136261u;
  for (const unsigned char c : job) hash = (hash ^ c) * 16777619u;
  return 20000 + static_cast<int>(hash % 12768);
}

// In this order because launchers nest: torchrun inside a Slurm job sets its own variables beside Slurm's,
// and means those.
Cluster detect(const Known& known) {
  for (const auto ask : {torchrun, pet, open_mpi, pmi, pmix, slurm}) {
    const auto cluster = ask(known);
    if (!cluster) continue;
    if (base::log_enabled(LogLevel::kInfo)) {
      const auto said = [](std::optional<int> number) { return number ? base::cat(*number) : "unknown"; };
      base::log(LogLevel::kInfo,
                base::cat("environment of ", cluster->source, ": rank ", said(cluster->rank), " of ",
                          said(cluster->world_size), ", store at ",
                          cluster->master_addr.empty() ? "no address" : cluster->master_addr, " port ",
                          said(cluster->master_port), " (", cluster->details, ")"));
    }
    return *cluster;
  }
  base::log(LogLevel::kInfo, "environment: no launcher found");
  Cluster nobody;
  read_master(nobody);  // for ranks that are given as arguments
  return nobody;
}

}  // namespace internal

Cluster detect_cluster() {
  return internal::detect({});
}

}  // namespace lockstep
