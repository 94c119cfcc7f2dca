// The contract suite over the Gloo plug-in, ranks as processes on two hosts.
#include <cstdio>

#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

lockstep::testing::TwoHosts* hosts() {
  static std::string why;
  static const auto two = lockstep::testing::TwoHosts::make(why);
  static const bool told = two == nullptr && std::printf("skipped, no second host: %s\n", why.c_str()) > 0;
  return told ? nullptr : two.get();
}

const lockstep_engine* gloo_engine() {
  if (hosts() == nullptr) return nullptr;
  static const Engine engine = load_engine(GLOO_PLUGIN);
  return &engine.table();
}

// The first half of the ranks on one host, the rest on the other.
void enter(int rank, int size) {
  hosts()->enter(rank < (size + 1) / 2 ? 0 : 1);
  ::setenv("MASTER_ADDR", hosts()->address(0).c_str(), 1);
}

INSTANTIATE_TEST_SUITE_P(Gloo, EngineContract,
                         ::testing::Values(EngineKind{.name = "two_hosts",
                                                      .table = gloo_engine,
                                                      .ranks = EngineKind::Ranks::kProcesses,
                                                      .sizes = {2, 4},
                                                      .rank_order = true,
                                                      .everything = true,
                                                      .enter = enter,
                                                      .max_idle_threads = 8}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
