#include "lockstep/cuda/cuda.h"

#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

TEST(Cuda, SaysWhyItCannotBeUsed) {
  std::string why;
  if (cuda::load(&why)) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_NE(why, "");
  EXPECT_EQ(cuda::device_count(), 0);
}

TEST(Cuda, RefusesADeviceThatDoesNotExist) {
  try {
    cuda::set_device(1000);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep
