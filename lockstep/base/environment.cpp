#include "lockstep/base/detail/environment.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/env_dump.h"
#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

// One row per EnvVar, in its order: name_of() indexes the table. default_text and meaning are documentation
// only, which docs/env.md repeats row by row (base_test compares them); the code that reads a variable
// applies the default itself, so a default that changes must change in both places. A variable that lockstep
// reads must be here: tests clear exactly these (clean_environment.h), and one that is missing would reach
// them from the developer's shell.
constexpr EnvVarInfo kTable[] = {
    {EnvVar::kRank, "RANK", "", "this process's rank in the world"},
    {EnvVar::kWorldSize, "WORLD_SIZE", "", "number of ranks in the world"},
    {EnvVar::kLocalRank, "LOCAL_RANK", "", "rank among the processes of this host"},
    {EnvVar::kLocalWorldSize, "LOCAL_WORLD_SIZE", "", "number of ranks on this host"},
    {EnvVar::kGroupRank, "GROUP_RANK", "", "this host's number among the hosts"},
    {EnvVar::kGroupWorldSize, "GROUP_WORLD_SIZE", "", "number of hosts"},
    {EnvVar::kRoleRank, "ROLE_RANK", "", "rank among the workers of the same role"},
    {EnvVar::kRoleWorldSize, "ROLE_WORLD_SIZE", "", "number of workers of the same role"},
    {EnvVar::kRoleName, "ROLE_NAME", "", "name of this worker's role"},
    {EnvVar::kMasterAddr, "MASTER_ADDR", "", "host of the rendezvous store"},
    {EnvVar::kMasterPort, "MASTER_PORT", "", "port of the rendezvous store"},
    {EnvVar::kElasticUseAgentStore, "TORCHELASTIC_USE_AGENT_STORE", "",
     "True: the launcher holds the store and every rank is its client"},
    {EnvVar::kElasticRunId, "TORCHELASTIC_RUN_ID", "", "name of the job; set means started by a launcher"},
    {EnvVar::kElasticRestartCount, "TORCHELASTIC_RESTART_COUNT", "", "how often the workers were restarted"},
    {EnvVar::kElasticMaxRestarts, "TORCHELASTIC_MAX_RESTARTS", "", "how often they may be"},
    {EnvVar::kElasticErrorFile, "TORCHELASTIC_ERROR_FILE", "", "where a worker may write its error as JSON"},
    {EnvVar::kNcclAsyncErrorHandling, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1",
     "set for workers as torchrun does"},
    {EnvVar::kUseLibuv, "USE_LIBUV", "1",
     "0 asked torch for its plain store server; lockstep has one server and logs that"},
    {EnvVar::kDistInitBarrier, "TORCH_DIST_INIT_BARRIER", "0",
     "1: a store barrier ends every group creation"},
    {EnvVar::kOmpNumThreads, "OMP_NUM_THREADS", "",
     "threads per rank; the launcher sets 1 when unset and ranks > 1"},
    {EnvVar::kTorchCppLogLevel, "TORCH_CPP_LOG_LEVEL", "", "log level when LOCKSTEP_LOG is unset"},
    {EnvVar::kDistributedDebug, "TORCH_DISTRIBUTED_DEBUG", "OFF",
     "OFF, INFO or DETAIL: what groups and DDP check and log; with TORCH_CPP_LOG_LEVEL=INFO also the log "
     "level"},
    {EnvVar::kShowCppStacktraces, "TORCH_SHOW_CPP_STACKTRACES", "0",
     "1: errors about ranks out of step carry the C++ stack"},
    {EnvVar::kPetNnodes, "PET_NNODES", "", "preset of --nnodes"},
    {EnvVar::kPetNprocPerNode, "PET_NPROC_PER_NODE", "", "preset of --nproc-per-node"},
    {EnvVar::kPetNodeRank, "PET_NODE_RANK", "", "preset of --node-rank"},
    {EnvVar::kPetMasterAddr, "PET_MASTER_ADDR", "", "preset of --master-addr"},
    {EnvVar::kPetMasterPort, "PET_MASTER_PORT", "", "preset of --master-port"},
    {EnvVar::kPetRole, "PET_ROLE", "", "preset of --role"},
    {EnvVar::kLogLinePrefixTemplate, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "",
     "prefix of the launcher's output lines, with ${role_name}, ${rank} and ${local_rank}"},
    {EnvVar::kOmpiRank, "OMPI_COMM_WORLD_RANK", "", "rank under Open MPI"},
    {EnvVar::kOmpiSize, "OMPI_COMM_WORLD_SIZE", "", "ranks under Open MPI"},
    {EnvVar::kOmpiLocalRank, "OMPI_COMM_WORLD_LOCAL_RANK", "", "local rank under Open MPI"},
    {EnvVar::kOmpiLocalSize, "OMPI_COMM_WORLD_LOCAL_SIZE", "", "local ranks under Open MPI"},
    {EnvVar::kOmpiJobId, "OMPI_MCA_ess_base_jobid", "",
     "Open MPI's job number; picks the store's port when all ranks share a host and MASTER_PORT is unset"},
    {EnvVar::kPmiRank, "PMI_RANK", "", "rank under a PMI launcher (MPICH, Intel MPI)"},
    {EnvVar::kPmiSize, "PMI_SIZE", "", "ranks under a PMI launcher"},
    {EnvVar::kPmixRank, "PMIX_RANK", "", "rank under a PMIx launcher"},
    {EnvVar::kPmixNamespace, "PMIX_NAMESPACE", "", "the PMIx job's name; picks the store's port likewise"},
    {EnvVar::kMpiLocalRankId, "MPI_LOCALRANKID", "", "local rank under a PMI launcher"},
    {EnvVar::kMpiLocalNRanks, "MPI_LOCALNRANKS", "", "local ranks under a PMI launcher"},
    {EnvVar::kSlurmProcId, "SLURM_PROCID", "", "rank under Slurm"},
    {EnvVar::kSlurmNTasks, "SLURM_NTASKS", "", "ranks under Slurm"},
    {EnvVar::kSlurmLocalId, "SLURM_LOCALID", "", "local rank under Slurm"},
    {EnvVar::kSlurmStepNodelist, "SLURM_STEP_NODELIST", "",
     "hosts of the Slurm step; the first holds the store"},
    {EnvVar::kSlurmNodelist, "SLURM_NODELIST", "", "hosts of the Slurm job, when the step names none"},
    {EnvVar::kSlurmJobId, "SLURM_JOB_ID", "",
     "Slurm's job number; picks the store's port when MASTER_PORT is unset"},
    {EnvVar::kSlurmStepId, "SLURM_STEP_ID", "",
     "number of the srun within the job; two of them get two ports"},
    {EnvVar::kSlurmNTasksPerNode, "SLURM_NTASKS_PER_NODE", "", "local ranks under Slurm"},
    {EnvVar::kSlurmStepNumNodes, "SLURM_STEP_NUM_NODES", "", "hosts under Slurm"},
    {EnvVar::kSlurmNodeId, "SLURM_NODEID", "", "this host's number under Slurm"},
    {EnvVar::kCudaVisibleDevices, "CUDA_VISIBLE_DEVICES", "",
     "GPUs that -n gpu counts, as CUDA reads it: empty or -1 hides all"},
    {EnvVar::kNoColor, "NO_COLOR", "", "set: the launcher colours nothing"},
    {EnvVar::kGlooSocketIfname, "GLOO_SOCKET_IFNAME", "",
     "interfaces Gloo uses, comma separated; operations take turns; default: the one towards MASTER_ADDR"},
    {EnvVar::kGlooDeviceTransport, "GLOO_DEVICE_TRANSPORT", "TCP",
     "Gloo's transport; Debian's libgloo has TCP only"},
    {EnvVar::kGlooLazyInit, "TORCH_GLOO_LAZY_INIT", "0", "1: Gloo connects at a group's first operation"},
    {EnvVar::kNcclLibrary, "LOCKSTEP_NCCL_LIBRARY", "",
     "NCCL's file for the NCCL plug-in; default: one that is loaded, else libnccl.so.2"},
    {EnvVar::kNcclHighPriority, "TORCH_NCCL_HIGH_PRIORITY", "0",
     "1: NCCL's operations run on streams of the highest priority"},
    {EnvVar::kNcclMultiRankGpu, "NCCL_MULTI_RANK_GPU_ENABLE", "0",
     "1: ranks may share a GPU, with NCCL 2.30 or newer"},
    {EnvVar::kNcclSocketIfname, "NCCL_SOCKET_IFNAME", "",
     "interfaces NCCL uses between hosts; read by NCCL itself"},
    {EnvVar::kLockstepLog, "LOCKSTEP_LOG", "warn", "log level: error, warn, info, debug or trace"},
    {EnvVar::kLockstepSecretFd, "LOCKSTEP_SECRET_FD", "",
     "inherited descriptor with the job secret; set by the launcher"},
    {EnvVar::kLockstepSecretFile, "LOCKSTEP_SECRET_FILE", "", "file of mode 0600 with the job secret"},
    {EnvVar::kLockstepInsecure, "LOCKSTEP_INSECURE", "",
     "1: allow a store that listens beyond loopback without a secret"},
    {EnvVar::kLockstepLauncher, "LOCKSTEP_LAUNCHER", "",
     "process id of the lockstep launcher; its store requires the secret"},
    {EnvVar::kLockstepSpawn, "LOCKSTEP_SPAWN", "",
     "set by spawn in the processes it starts: which call, which index"},
    {EnvVar::kLockstepHostArena, "LOCKSTEP_HOST_ARENA_MB", "",
     "address space of a rank's shared arena in MiB; default: the machine's memory, at most 16 TiB or half "
     "of the "
     "address space limit for all ranks"},
    {EnvVar::kLockstepEnginePath, "LOCKSTEP_ENGINE_PATH", "",
     "folders, colon separated, where plug-ins of engines are looked for first"},
    {EnvVar::kLockstepInPlaceBytes, "LOCKSTEP_DDP_IN_PLACE_BYTES", "131072",
     "gradients of at least so many bytes are reduced in place, not in a bucket; unset on a GPU: 8 MiB"},
    {EnvVar::kLockstepStagedOnly, "LOCKSTEP_STAGED_ONLY", "",
     "1: ordinary memory travels between processes through the arenas, never copied by the kernel"},
    {EnvVar::kLockstepNotes, "LOCKSTEP_NOTES", "",
     "set by the launcher and spawn: where a rank notes that it fails because of another"},
    {EnvVar::kLockstepTimeout, "LOCKSTEP_TIMEOUT", "1800",
     "seconds: the timeout of init_process_group and its groups where the program gives none"},
    {EnvVar::kLockstepSlowWait, "LOCKSTEP_SLOW_WAIT", "10",
     "seconds after which a wait logs once who waits for whom; 0: never"},
};
static_assert(std::size(kTable) == static_cast<std::size_t>(EnvVar::kCount));

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kTable); ++i) {
    if (static_cast<std::size_t>(kTable[i].var) != i) return false;
  }
  return true;
}
// At compile time: a row in the wrong place would make name_of() return the name of another variable.
static_assert(in_order());

}  // namespace

std::span<const EnvVarInfo> environment_table() {
  return kTable;
}

const char* name_of(EnvVar var) {
  return kTable[static_cast<std::size_t>(var)].name;
}

std::optional<std::string> environment(EnvVar var) {
  const char* text = std::getenv(name_of(var));
  // Launchers and shell scripts "unset" a variable by an empty value. Where "" has a meaning of its own,
  // callers use environment_verbatim().
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

std::optional<long> environment_int(EnvVar var) {
  const auto text = environment(var);
  if (!text) return std::nullopt;
  long value = 0;
  // from_chars, not strtol: independent of the locale, no leading spaces, and an overflow is an error. The
  // whole text must be the number, so that RANK=1x fails here and not as a wrong rank later.
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size()) {
    raise(ErrorKind::kUsage,
          cat("environment variable ", name_of(var), " must be an integer, but is \"", *text, "\""));
  }
  return value;
}

bool environment_flag(EnvVar var) {
  auto text = environment(var).value_or("");
  // unsigned char: tolower() of a negative value is undefined behaviour.
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text == "1" || text == "true" || text == "yes" || text == "on";
}

namespace {

// The variables of torch's dump for DDP. Most are read by engines, not by lockstep.
constexpr std::string_view kDumped[] = {"RANK",
                                        "LOCAL_RANK",
                                        "WORLD_SIZE",
                                        "MASTER_PORT",
                                        "MASTER_ADDR",
                                        "CUDA_VISIBLE_DEVICES",
                                        "GLOO_SOCKET_IFNAME",
                                        "GLOO_DEVICE_TRANSPORT",
                                        "NCCL_SOCKET_IFNAME",
                                        "TORCH_NCCL_BLOCKING_WAIT",
                                        "NCCL_DEBUG",
                                        "NCCL_DEBUG_SUBSYS",
                                        "NCCL_IB_DISABLE",
                                        "NCCL_P2P_DISABLE",
                                        "NCCL_P2P_LEVEL",
                                        "NCCL_SHM_DISABLE",
                                        "NCCL_SOCKET_NTHREADS",
                                        "NCCL_NSOCKS_PERTHREAD",
                                        "NCCL_BUFFSIZE",
                                        "NCCL_NTHREADS",
                                        "NCCL_RINGS",
                                        "NCCL_MAX_NCHANNELS",
                                        "NCCL_MIN_NCHANNELS",
                                        "NCCL_CHECKS_DISABLE",
                                        "NCCL_CHECK_POINTERS",
                                        "NCCL_LAUNCH_MODE",
                                        "NCCL_IB_HCA",
                                        "NCCL_IB_TIMEOUT",
                                        "NCCL_IB_RETRY_CNT",
                                        "NCCL_IB_GID_INDEX",
                                        "NCCL_IB_SL",
                                        "NCCL_IB_TC",
                                        "NCCL_IB_AR_THRESHOLD",
                                        "NCCL_IB_CUDA_SUPPORT",
                                        "NCCL_NET_GDR_LEVEL",
                                        "NCCL_NET_GDR_READ",
                                        "NCCL_SINGLE_RING_THRESHOLD",
                                        "NCCL_LL_THRESHOLD",
                                        "NCCL_TREE_THRESHOLD",
                                        "NCCL_ALGO",
                                        "NCCL_PROTO",
                                        "NCCL_IGNORE_CPU_AFFINITY",
                                        "NCCL_DEBUG_FILE",
                                        "NCCL_COLLNET_ENABLE",
                                        "NCCL_TOPO_FILE",
                                        "NCCL_TOPO_DUMP_FILE",
                                        "TORCH_NCCL_ASYNC_ERROR_HANDLING"};

}  // namespace
}  // namespace lockstep::base

std::string lockstep::dump_environment() {
  using namespace lockstep::base;
  std::string text;
  const auto add = [&](std::string_view name) {
    // Not environment(): a dump shows an empty value as empty, not as N/A. LOCKSTEP_SECRET_FD and
    // LOCKSTEP_SECRET_FILE say where the secret is, so printing every variable of the table does not reveal
    // it.
    const char* value = std::getenv(std::string(name).c_str());
    text += cat("env:", name, "=", value == nullptr ? "N/A" : value, "\n");
  };
  for (const auto name : kDumped) add(name);
  // torch's variables come first, in torch's order; those that are in both lists are printed once.
  for (const EnvVarInfo& info : kTable) {
    if (std::ranges::find(kDumped, info.name) == std::end(kDumped)) add(info.name);
  }
  return text;
}
