// The contract suite on device memory, tested with an engine that is simple and right. Ranks are threads.
#include "lockstep/engine/engine_contract.h"
#include "tests/cuda/staged_engine.h"
#include "tests/cuda/test_memory.h"

namespace lockstep::comm {
namespace {

EngineKind kind() {
  return {.name = "threads",
          .table = cuda::staged_engine,
          .sizes = {1, 2, 3},
          .rank_order = true,
          .everything = true,
          .memory = cuda::test_memory};
}

INSTANTIATE_TEST_SUITE_P(Staged, EngineContract, ::testing::Values(kind()), kind_name);
INSTANTIATE_TEST_SUITE_P(Staged, EngineDeviceContract, ::testing::Values(kind()), kind_name);

}  // namespace
}  // namespace lockstep::comm
