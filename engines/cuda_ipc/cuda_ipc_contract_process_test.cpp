// The contract suite over cuda_ipc, ranks as processes: memory is exported and opened.
#include "engines/cuda_ipc/contract_testing.h"

namespace lockstep::comm {
namespace {

const auto kKinds = ::testing::Values(EngineKind{.name = "processes",
                                                 .table = cuda_ipc::plugin_table,
                                                 .ranks = EngineKind::Ranks::kProcesses,
                                                 .sizes = process_sizes(),
                                                 .rank_order = true,
                                                 .everything = true,
                                                 .memory = cuda::test_memory,
                                                 .run_awaits_streams = true,
                                                 .max_idle_threads = 4});
INSTANTIATE_TEST_SUITE_P(CudaIpc, EngineContract, kKinds, kind_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, EngineDeviceContract, kKinds, kind_name);

}  // namespace
}  // namespace lockstep::comm
