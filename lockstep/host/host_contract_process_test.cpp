// The contract suite over the host engine, ranks as processes.
#include "lockstep/engine/engine_contract.h"
#include "lockstep/host/host.h"

namespace lockstep::comm {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, EngineContract,
                         ::testing::Values(EngineKind{.name = "processes",
                                                      .table = host_engine,
                                                      .ranks = EngineKind::Ranks::kProcesses,
                                                      .sizes = process_sizes(),
                                                      .rank_order = true,
                                                      .everything = true,
                                                      .max_idle_threads = 4}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
