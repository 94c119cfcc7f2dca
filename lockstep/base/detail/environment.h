// Every environment variable lockstep reads or sets, in one table with its meaning. Only base/ and plug-ins
// call getenv; docs/env.md documents the same table, and a test keeps the two in sync.
//
// Values are read on each call (the launcher and tests change them), never cached. Thread safety: any thread,
// except concurrently with setenv, as with getenv.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::base {

enum class EnvVar : int {
  // torchrun's worker environment
  kRank,
  kWorldSize,
  kLocalRank,
  kLocalWorldSize,
  kGroupRank,
  kGroupWorldSize,
  kRoleRank,
  kRoleWorldSize,
  kRoleName,
  kMasterAddr,
  kMasterPort,
  kElasticUseAgentStore,
  kElasticRunId,
  kElasticRestartCount,
  kElasticMaxRestarts,
  kElasticErrorFile,
  kNcclAsyncErrorHandling,
  kUseLibuv,
  kDistInitBarrier,
  kOmpNumThreads,
  kTorchCppLogLevel,
  kDistributedDebug,
  kShowCppStacktraces,
  // torchrun's flags preset by environment
  kPetNnodes,
  kPetNprocPerNode,
  kPetNodeRank,
  kPetMasterAddr,
  kPetMasterPort,
  kPetRole,
  kLogLinePrefixTemplate,
  // other launchers
  kOmpiRank,
  kOmpiSize,
  kOmpiLocalRank,
  kOmpiLocalSize,
  kOmpiJobId,
  kPmiRank,
  kPmiSize,
  kPmixRank,
  kPmixNamespace,
  kMpiLocalRankId,
  kMpiLocalNRanks,
  kSlurmProcId,
  kSlurmNTasks,
  kSlurmLocalId,
  kSlurmStepNodelist,
  kSlurmNodelist,
  kSlurmJobId,
  kSlurmStepId,
  kSlurmNTasksPerNode,
  kSlurmStepNumNodes,
  kSlurmNodeId,
  // read by the launcher
  kCudaVisibleDevices,
  kNoColor,
  // read by the Gloo plug-in
  kGlooSocketIfname,
  kGlooDeviceTransport,
  kGlooLazyInit,
  kNcclLibrary,
  kNcclHighPriority,
  kNcclMultiRankGpu,
  kNcclSocketIfname,
  // lockstep's own
  kLockstepLog,
  kLockstepSecretFd,
  kLockstepSecretFile,
  kLockstepInsecure,
  kLockstepLauncher,
  kLockstepSpawn,
  kLockstepHostArena,
  kLockstepEnginePath,
  kLockstepInPlaceBytes,
  kLockstepStagedOnly,
  kLockstepNotes,
  kLockstepTimeout,
  kLockstepSlowWait,
  kCount,
};

struct EnvVarInfo {
  EnvVar var;
  const char* name;
  const char* default_text;  // "" when there is none
  const char* meaning;       // one line
};

// The whole table, in the order of EnvVar.
std::span<const EnvVarInfo> environment_table();
const char* name_of(EnvVar var);

// The value, or nothing when unset. An empty value counts as unset.
std::optional<std::string> environment(EnvVar var);
// The value as an integer. Raises kUsage with the variable's name and value when it is not one.
std::optional<long> environment_int(EnvVar var);
// True for 1, true, yes, on in any case; false for anything else or unset.
bool environment_flag(EnvVar var);

}  // namespace lockstep::base
