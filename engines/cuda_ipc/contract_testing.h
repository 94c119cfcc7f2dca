// The plug-in as the tests load it: on the fake driver, or on a GPU where the test is linked without the fake. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/base/path_testing.h"
#include "lockstep/engine/engine_contract.h"
#include "lockstep/engine/loader.h"
#include "tests/cuda/test_memory.h"

namespace lockstep::cuda_ipc {

// CUDA_IPC_PLUGIN and CUDA_IPC_FAKE_KERNELS: paths from the program's folder.
inline const lockstep_engine* plugin_table() {
  ::setenv("FAKE_CUDA_KERNELS", path_testing::from_program(CUDA_IPC_FAKE_KERNELS).c_str(), 0);
  static const comm::Engine engine = comm::load_engine(path_testing::from_program(CUDA_IPC_PLUGIN));
  return &engine.table();
}

}  // namespace lockstep::cuda_ipc
