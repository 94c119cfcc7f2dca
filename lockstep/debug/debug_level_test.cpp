#include "lockstep/debug/debug.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

TEST(DebugLevels, ComeFromTheEnvironmentAndCanBeSet) {
  EXPECT_EQ(get_debug_level(), DebugLevel::kOff);
  const struct {
    const char* text;
    DebugLevel level;
  } rows[] = {{"INFO", DebugLevel::kInfo}, {"detail", DebugLevel::kDetail}, {"OFF", DebugLevel::kOff}};
  for (const auto& row : rows) {
    ::setenv("TORCH_DISTRIBUTED_DEBUG", row.text, 1);
    set_debug_level_from_env();
    EXPECT_EQ(get_debug_level(), row.level);
  }
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD", 1);
  try {
    set_debug_level_from_env();
    ADD_FAILURE() << "nothing was raised";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    const std::string text = error.what();
    EXPECT_NE(text.find("LOUD"), std::string::npos) << text;
    EXPECT_NE(text.find("DETAIL"), std::string::npos) << text;
  }
  ::unsetenv("TORCH_DISTRIBUTED_DEBUG");
  set_debug_level(DebugLevel::kInfo);
  EXPECT_EQ(get_debug_level(), DebugLevel::kInfo);
  set_debug_level_from_env();
  EXPECT_EQ(get_debug_level(), DebugLevel::kOff);
}

}  // namespace
}  // namespace lockstep
