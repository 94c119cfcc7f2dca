// The contract suite over the NCCL plug-in, with a fake NCCL and a fake driver; ranks are threads, each with a GPU.
#include <cstdlib>

#include "lockstep/base/path_testing.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "tests/cuda/test_memory.h"

namespace lockstep::comm {
namespace {

// Before the fake driver is initialised, which is when it reads them.
const bool kEnvironmentIsSet =
    ::setenv("FAKE_CUDA_DEVICES", "8", 1) == 0 && ::setenv("FAKE_CUDA_RELAXED", "1", 1) == 0;

const lockstep_engine* nccl_engine() {
  static const Engine engine = load_engine(path_testing::from_program(NCCL_PLUGIN));
  return &engine.table();
}

// Calls that differ between ranks hang in NCCL, as they do without lockstep. The streams of the fake driver are threads: how
// many 200 communicators add says nothing.
const EngineKind kThreads{
    .name = "threads", .table = nccl_engine, .compares_calls = false, .memory = cuda::test_memory};

INSTANTIATE_TEST_SUITE_P(Nccl, EngineContract, ::testing::Values(kThreads), kind_name);
INSTANTIATE_TEST_SUITE_P(Nccl, EngineDeviceContract, ::testing::Values(kThreads), kind_name);

}  // namespace
}  // namespace lockstep::comm
