// CUDA memory for the contract suite of engines (lockstep/engine/test_memory.h), over the driver: a real GPU, or
// tests/fake_cuda. For tests only.
#pragma once

#include <memory>

#include "lockstep/engine/test_memory.h"

namespace lockstep::cuda {

// Rank r uses device r modulo the number of devices. Raises when there is none.
std::unique_ptr<comm::testing::TestMemory> test_memory(int rank, int size);

}  // namespace lockstep::cuda
