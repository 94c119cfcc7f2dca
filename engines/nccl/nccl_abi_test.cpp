// Our declarations against nccl.h. There is nothing to run: what differs does not compile.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "engines/nccl/nccl_api.h"

namespace lockstep::nccl_plugin {
namespace {

#define SAME(ours, theirs) static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))
SAME(kSuccess, ncclSuccess);
SAME(kUnhandledCudaError, ncclUnhandledCudaError);
SAME(kSystemError, ncclSystemError);
SAME(kInternalError, ncclInternalError);
SAME(kInvalidArgument, ncclInvalidArgument);
SAME(kInvalidUsage, ncclInvalidUsage);
SAME(kRemoteError, ncclRemoteError);
SAME(kInProgress, ncclInProgress);
SAME(kInt8, ncclInt8);
SAME(kUint8, ncclUint8);
SAME(kInt32, ncclInt32);
SAME(kInt64, ncclInt64);
SAME(kFloat16, ncclFloat16);
SAME(kFloat32, ncclFloat32);
SAME(kFloat64, ncclFloat64);
SAME(kBfloat16, ncclBfloat16);
SAME(kSum, ncclSum);
SAME(kProd, ncclProd);
SAME(kMax, ncclMax);
SAME(kMin, ncclMin);
SAME(kAvg, ncclAvg);
SAME(kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME(sizeof(UniqueId), sizeof(ncclUniqueId));

// Enums cross the interface as ints.
static_assert(sizeof(ncclResult_t) == sizeof(Result) && sizeof(ncclDataType_t) == sizeof(DataType) &&
              sizeof(ncclRedOp_t) == sizeof(RedOp));

#define FIELD(ours, theirs)                                     \
  SAME(offsetof(Config, ours), offsetof(ncclConfig_t, theirs)); \
  SAME(sizeof(Config::ours), sizeof(ncclConfig_t::theirs))
FIELD(size, size);
FIELD(magic, magic);
FIELD(version, version);
FIELD(blocking, blocking);
FIELD(cga_cluster_size, cgaClusterSize);
FIELD(min_ctas, minCTAs);
FIELD(max_ctas, maxCTAs);
FIELD(net_name, netName);
FIELD(split_share, splitShare);
#if NCCL_VERSION_CODE >= 22800
FIELD(traffic_class, trafficClass);
FIELD(comm_name, commName);
FIELD(collnet_enable, collnetEnable);
FIELD(cta_policy, CTAPolicy);
FIELD(shrink_share, shrinkShare);
FIELD(nvls_ctas, nvlsCTAs);
FIELD(channels_per_net_peer, nChannelsPerNetPeer);
FIELD(nvlink_centric_sched, nvlinkCentricSched);
// Newer headers may have grown at the end.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
#endif

[[maybe_unused]] constexpr ncclConfig_t kInitializer = NCCL_CONFIG_INITIALIZER;
static_assert(kInitializer.magic == kConfigMagic);

// As many arguments, each of the same size and kind.
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class A, class B>
constexpr bool kSameShape =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>&& std::is_class_v<A> ==
                                  std::is_class_v<B>;
template <class R, class... A, class S, class... B>
struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<sizeof...(A) == sizeof...(B) && kSameShape<R, S> && (kSameShape<A, B> && ...)> {};
#define ENTRY_IS_ALIKE(member, theirs) \
  static_assert(Alike<decltype(Library::member), decltype(&theirs)>::value)
ENTRY_IS_ALIKE(get_version, ncclGetVersion);
ENTRY_IS_ALIKE(get_unique_id, ncclGetUniqueId);
ENTRY_IS_ALIKE(comm_init_rank_config, ncclCommInitRankConfig);
ENTRY_IS_ALIKE(comm_finalize, ncclCommFinalize);
ENTRY_IS_ALIKE(comm_destroy, ncclCommDestroy);
ENTRY_IS_ALIKE(comm_abort, ncclCommAbort);
ENTRY_IS_ALIKE(comm_get_async_error, ncclCommGetAsyncError);
ENTRY_IS_ALIKE(get_error_string, ncclGetErrorString);
ENTRY_IS_ALIKE(get_last_error, ncclGetLastError);
ENTRY_IS_ALIKE(group_start, ncclGroupStart);
ENTRY_IS_ALIKE(group_end, ncclGroupEnd);
ENTRY_IS_ALIKE(all_reduce, ncclAllReduce);
ENTRY_IS_ALIKE(broadcast, ncclBroadcast);
ENTRY_IS_ALIKE(reduce, ncclReduce);
ENTRY_IS_ALIKE(all_gather, ncclAllGather);
ENTRY_IS_ALIKE(reduce_scatter, ncclReduceScatter);
ENTRY_IS_ALIKE(send, ncclSend);
ENTRY_IS_ALIKE(recv, ncclRecv);
#if NCCL_VERSION_CODE >= 22809
ENTRY_IS_ALIKE(comm_revoke, ncclCommRevoke);
#endif

}  // namespace
}  // namespace lockstep::nccl_plugin
