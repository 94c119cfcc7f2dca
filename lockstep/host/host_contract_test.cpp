// The contract suite over the host engine, ranks as threads.
#include "lockstep/engine/engine_contract.h"
#include "lockstep/host/host.h"

namespace lockstep::comm {
namespace {

// The engine that all others are made of: every size, but for races.
const std::vector<int> kSizes =
    long_testing::kUnderTsan ? contract_sizes() : std::vector<int>{1, 2, 3, 4, 7, 8};

INSTANTIATE_TEST_SUITE_P(Host, EngineContract,
                         ::testing::Values(EngineKind{.name = "threads",
                                                      .table = host_engine,
                                                      .sizes = kSizes,
                                                      .rank_order = true,
                                                      .everything = true,
                                                      .max_idle_threads = 4}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
