// The contract suite over the Gloo plug-in, ranks as threads over loopback.
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"

namespace lockstep::comm {
namespace {

const lockstep_engine* gloo_engine() {
  static const Engine engine = load_engine(path_testing::from_program(GLOO_PLUGIN));
  return &engine.table();
}

INSTANTIATE_TEST_SUITE_P(Gloo, EngineContract,
                         ::testing::Values(EngineKind{.name = "threads",
                                                      .table = gloo_engine,
                                                      .rank_order = true,
                                                      .everything = true,
                                                      .max_idle_threads = 8}),
                         kind_name);

}  // namespace
}  // namespace lockstep::comm
