// For test programs that run on GPUs: every rank is a process of `lockstep run` (or a world of one) that runs the
// same cases in the same order, on the GPU that it shares with the others or has alone. Without a GPU every case is
// skipped with a line that says why.
#pragma once

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>

#include "lockstep/cuda/cuda.h"
#include "lockstep/lockstep.h"

namespace lockstep::gpu_testing {

inline constexpr Milliseconds kPatience{60'000};  // ends a broken run

// "" when GPUs can be used.
inline const std::string& why_not() {
  static const std::string reason = [] {
    std::string why;
    return cuda::load(&why) ? std::string() : why;
  }();
  return reason;
}

inline c10::Device gpu() {
  const char* const local = std::getenv("LOCAL_RANK");
  const int rank = local == nullptr ? 0 : std::atoi(local);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(rank % cuda::device_count())};
}

inline at::TensorOptions on_gpu(at::ScalarType type = at::kFloat) {
  return at::TensorOptions().dtype(type).device(gpu());
}

inline c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(gpu());
}
inline void synchronize() {
  c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(gpu().index());
}

// Work that keeps the current stream busy for tens of milliseconds, on any GPU of this decade.
inline void delay(int n = 20) {
  static const at::Tensor a = torch::randn({4096, 4096}, on_gpu());
  static at::Tensor b = torch::empty({4096, 4096}, on_gpu());
  for (int i = 0; i < n; ++i) at::mm_out(b, a, a);
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_not().empty()) GTEST_SKIP() << "no GPU: " << why_not();
  }
  static int rank() { return get_rank(); }
  static int size() { return get_world_size(); }
};

// The main function of such a program: joins the world that the environment describes.
inline int run_all(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (why_not().empty()) {
    cuda::set_device(gpu().index());
    const char* const backend = std::getenv("GPU_TEST_BACKEND");
    init_process_group({.backend = backend == nullptr ? "" : backend, .timeout = kPatience});
    if (get_rank() == 0) std::printf("backend: %s\n", get_backend_config().c_str());
  }
  const int failed = RUN_ALL_TESTS();
  if (is_initialized()) destroy_process_group();
  return failed;
}

}  // namespace lockstep::gpu_testing
