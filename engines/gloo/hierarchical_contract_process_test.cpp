// The contract suite over the hierarchical engine as users get it: shared memory inside a host, Gloo between two, ranks as
// processes in network namespaces.
#include <cstdio>

#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

lockstep::testing::TwoHosts* hosts() {
  static std::string why;
  static const auto two = lockstep::testing::TwoHosts::make(why);
  static const bool told = two == nullptr && std::printf("skipped, no second host: %s\n", why.c_str()) > 0;
  return told ? nullptr : two.get();
}

const lockstep_engine* table() {
  if (hosts() == nullptr) return nullptr;
  static const Engine host(host_engine(), "built in");
  static const Engine gloo = load_engine(GLOO_PLUGIN);
  static const HierarchicalEngine engine(host, gloo);
  return engine.table();
}

// The first half of the ranks on one host, the rest on the other.
void enter(int rank, int size) {
  hosts()->enter(rank < (size + 1) / 2 ? 0 : 1);
  ::setenv("MASTER_ADDR", hosts()->address(0).c_str(), 1);
}

INSTANTIATE_TEST_SUITE_P(Hierarchical, EngineContract,
                         ::testing::Values(EngineKind{.name = "two_hosts",
                                                      .table = table,
                                                      .ranks = EngineKind::Ranks::kProcesses,
                                                      .sizes = {4},
                                                      .everything = true,
                                                      .enter = enter}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
