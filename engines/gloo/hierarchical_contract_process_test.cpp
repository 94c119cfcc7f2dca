// The contract suite over the hierarchical engine as users get it: shared memory inside a host, Gloo between
// two, ranks as processes in network namespaces.
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

const lockstep_engine* table() {
  if (lockstep::testing::two_hosts() == nullptr) return nullptr;
  static const Engine host(host_engine(), "built in");
  static const Engine gloo = load_engine(path_testing::from_program(GLOO_PLUGIN));
  static const HierarchicalEngine engine(host, gloo);
  return engine.table();
}

INSTANTIATE_TEST_SUITE_P(Hierarchical, EngineContract,
                         ::testing::Values(EngineKind{.name = "two_hosts",
                                                      .table = table,
                                                      .ranks = EngineKind::Ranks::kProcesses,
                                                      .sizes = process_sizes(),
                                                      .everything = true,
                                                      .enter = lockstep::testing::enter_half}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
