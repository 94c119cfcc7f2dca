// NCCL's binary interface, as far as the plug-in uses it, and the library that offers it, found at run time. Nothing of NCCL
// is needed to build lockstep or to load the plug-in. nccl_abi_test.cpp compares the declarations with nccl.h where that
// file is installed.
//
// Calls of communicators made with blocking = 0 return kInProgress when they continue on a thread of NCCL's: until
// comm_get_async_error gives another result, no other call may be made for that communicator.
// Thread safety: immutable once found. A communicator is used by one thread at a time, except for comm_revoke, comm_abort
// and comm_get_async_error.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "engines/cuda/driver.h"

namespace lockstep::nccl_plugin {

using Comm = struct CommObject*;

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

// NCCL reads as many bytes as the smaller of `size` and its own struct, and gives fields newer than `version` their
// defaults: the layout of 2.28 serves older and newer libraries.
inline constexpr int kUndefined = INT_MIN;
inline constexpr unsigned kConfigMagic = 0xcafebeef;
inline constexpr unsigned kConfigVersion = 22800;
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = kConfigVersion;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
};

// As ncclGetVersion counts.
inline constexpr int kMinVersion = 21800;  // communicators that do not block, in every call
inline constexpr int kRevokeVersion = 22809;
inline constexpr int kMultiRankGpuVersion = 23000;  // NCCL_MULTI_RANK_GPU_ENABLE

// clang-format off
#define LOCKSTEP_NCCL_ENTRIES(ENTRY)                                                                                      \
  ENTRY(get_version, "ncclGetVersion", Result, (int* version))                                                            \
  ENTRY(get_unique_id, "ncclGetUniqueId", Result, (UniqueId* id))                                                         \
  ENTRY(comm_init_rank_config, "ncclCommInitRankConfig", Result, (Comm* out, int size, UniqueId id, int rank,             \
        Config* config))                                                                                                  \
  ENTRY(comm_finalize, "ncclCommFinalize", Result, (Comm comm))                                                           \
  ENTRY(comm_destroy, "ncclCommDestroy", Result, (Comm comm))                                                             \
  ENTRY(comm_abort, "ncclCommAbort", Result, (Comm comm))                                                                 \
  ENTRY(comm_get_async_error, "ncclCommGetAsyncError", Result, (Comm comm, Result* error))                                \
  ENTRY(get_error_string, "ncclGetErrorString", const char*, (Result result))                                             \
  ENTRY(get_last_error, "ncclGetLastError", const char*, (Comm comm))                                                     \
  ENTRY(group_start, "ncclGroupStart", Result, ())                                                                        \
  ENTRY(group_end, "ncclGroupEnd", Result, ())                                                                            \
  ENTRY(all_reduce, "ncclAllReduce", Result, (const void* send, void* recv, std::size_t count, DataType type, RedOp op,   \
        Comm comm, cuda::Stream stream))                                                                                  \
  ENTRY(broadcast, "ncclBroadcast", Result, (const void* send, void* recv, std::size_t count, DataType type, int root,    \
        Comm comm, cuda::Stream stream))                                                                                  \
  ENTRY(reduce, "ncclReduce", Result, (const void* send, void* recv, std::size_t count, DataType type, RedOp op,          \
        int root, Comm comm, cuda::Stream stream))                                                                        \
  ENTRY(all_gather, "ncclAllGather", Result, (const void* send, void* recv, std::size_t count, DataType type, Comm comm,  \
        cuda::Stream stream))                                                                                             \
  ENTRY(reduce_scatter, "ncclReduceScatter", Result, (const void* send, void* recv, std::size_t count, DataType type,     \
        RedOp op, Comm comm, cuda::Stream stream))                                                                        \
  ENTRY(send, "ncclSend", Result, (const void* data, std::size_t count, DataType type, int peer, Comm comm,               \
        cuda::Stream stream))                                                                                             \
  ENTRY(recv, "ncclRecv", Result, (void* data, std::size_t count, DataType type, int peer, Comm comm,                     \
        cuda::Stream stream))
// clang-format on

struct Library {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define LOCKSTEP_NCCL_MEMBER(member, symbol, result, arguments) result(*member) arguments;
  LOCKSTEP_NCCL_ENTRIES(LOCKSTEP_NCCL_MEMBER)
#undef LOCKSTEP_NCCL_MEMBER
  // From 2.28.9 on; else null. Stops what is in flight and returns at once, where comm_abort takes half a second.
  Result (*comm_revoke)(Comm comm, int flags) = nullptr;

  int version = 0;
  std::string path;

  // The library of this process, looked for once; the answer, also a failure, is kept:
  //   1. the file that LOCKSTEP_NCCL_LIBRARY names; nothing else is tried then
  //   2. one that is loaded already, so that a process has one NCCL: libtorch_cuda brings one
  //   3. libnccl.so.2 as the dynamic linker finds it
  //   4. beside libtorch, and where its python wheels install it (nvidia/nccl/lib)
  // Null when there is none or it is too old; *why says so.
  static const Library* find(std::string* why);
};

// "2.28.9".
std::string version_text(int version);

}  // namespace lockstep::nccl_plugin
