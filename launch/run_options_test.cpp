// How many workers a word means.
#include "launch/run_options.h"

#include <gtest/gtest.h>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/error.h"
#include "lockstep/process/testing.h"

namespace lockstep::launch {
namespace {

using process_testing::TemporaryFolder;

struct Processes : ::testing::Test {
  Processes() {
    for (const char* name : {"nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"})
      std::ofstream(devices.file(name)) << "";
  }
  ~Processes() override { ::unsetenv("CUDA_VISIBLE_DEVICES"); }
  int gpus(const char* visible) {
    ::setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    return parse_processes("gpu", devices.file(""));
  }
  TemporaryFolder devices;
};

TEST_F(Processes, AutoIsOnePerCoreAlsoWhereThereAreGpus) {
  EXPECT_EQ(parse_processes("auto", devices.file("")), base::available_cores());
  EXPECT_EQ(parse_processes("cpu", devices.file("")), base::available_cores());
}

TEST_F(Processes, GpuIsOnePerDeviceThatCudaWouldShow) {
  EXPECT_EQ(parse_processes("gpu", devices.file("")), 3);
  EXPECT_EQ(gpus("1"), 1);
  EXPECT_EQ(gpus("2,0"), 2);
  EXPECT_EQ(gpus("GPU-8932f937,GPU-a1b2"), 2);
  EXPECT_EQ(gpus("0,-1,1"), 1) << "CUDA stops at the first that is none";
  EXPECT_EQ(gpus("0,1,7"), 2);
}

TEST_F(Processes, GpuIsRefusedWhereCudaWouldShowNone) {
  for (const char* visible : {"", "-1", "NoDevFiles"}) {
    EXPECT_THROW(gpus(visible), Error) << '"' << visible << '"';
  }
}

}  // namespace
}  // namespace lockstep::launch
