// The contract suite over the Gloo plug-in, ranks as processes on two hosts.
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

const lockstep_engine* gloo_engine() {
  if (lockstep::testing::two_hosts() == nullptr) return nullptr;
  static const Engine engine = load_engine(path_testing::from_program(GLOO_PLUGIN));
  return &engine.table();
}

INSTANTIATE_TEST_SUITE_P(Gloo, EngineContract,
                         ::testing::Values(EngineKind{.name = "two_hosts",
                                                      .table = gloo_engine,
                                                      .ranks = EngineKind::Ranks::kProcesses,
                                                      .sizes = process_sizes(),
                                                      .rank_order = true,
                                                      .everything = true,
                                                      .enter = lockstep::testing::enter_half,
                                                      .max_idle_threads = 8}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
