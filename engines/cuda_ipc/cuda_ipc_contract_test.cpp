// The contract suite over cuda_ipc, ranks as threads: one process, so memory is used where it is.
#include "engines/cuda_ipc/contract_testing.h"

namespace lockstep::comm {
namespace {

const auto kKinds = ::testing::Values(EngineKind{.name = "threads",
                                                 .table = cuda_ipc::plugin_table,
                                                 .rank_order = true,
                                                 .everything = true,
                                                 .memory = cuda::test_memory,
                                                 .run_awaits_streams = true,
                                                 .max_idle_threads = 4});
INSTANTIATE_TEST_SUITE_P(CudaIpc, EngineContract, kKinds, kind_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, EngineDeviceContract, kKinds, kind_name);

}  // namespace
}  // namespace lockstep::comm
