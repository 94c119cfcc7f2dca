#include "lockstep/remote/remote_device.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

std::string normal(std::string_view text) {
  return RemoteDevice::parse(text).text();
}

TEST(RemoteDevice, NamesAWorkerAndADevice) {
  EXPECT_EQ(normal("ps/cpu"), "ps/cpu");
  EXPECT_EQ(normal("trainer:0-a_b/cuda:1"), "trainer:0-a_b/cuda:1");
  EXPECT_EQ(normal("rank:2/cuda"), "rank:2/cuda");
  const auto numbered = RemoteDevice::parse("rank:12/cpu");
  EXPECT_EQ(std::get<int>(numbered.worker()->target()), 12);
}

TEST(RemoteDevice, HalvesHaveDefaults) {
  EXPECT_EQ(normal("ps"), "ps/cpu");
  EXPECT_EQ(normal("rank:2"), "rank:2/cpu");
  EXPECT_EQ(normal("cuda:0"), "cuda:0");
  EXPECT_FALSE(RemoteDevice::parse("cpu").worker()) << "a device alone is this worker's";
}

TEST(RemoteDevice, RefusesWhatIsMalformed) {
  for (const auto* text :
       {"", "/", "/cpu", "ps/", "ps/toaster", "ps/cpu/0", "rank:/cpu", "rank:x/cpu", "rank:-1/cpu", "rank:1x",
        "rank:99999999999/cpu", "p s/cpu", "ps/cuda:x", "ps/cuda:-2"}) {
    EXPECT_THROW(RemoteDevice::parse(text), Error) << text;
  }
  EXPECT_THROW(RemoteDevice::parse(std::string(128, 'a') + "/cpu"), Error);
}

}  // namespace
}  // namespace lockstep
