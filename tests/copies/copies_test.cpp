// Two shared libraries that each contain lockstep: two worlds, and a word about it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/path_testing.h"

namespace {

using Call = const char* (*)();

struct Copy {
  explicit Copy(const char* path) : library(::dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    EXPECT_NE(library, nullptr) << ::dlerror();
  }
  // The words of the error; "" when there was none.
  std::string call(const char* name) const {
    const auto function = reinterpret_cast<Call>(::dlsym(library, name));
    if (function == nullptr) return "no such call";
    const char* words = function();
    return words != nullptr ? words : "";
  }
  void* library;
};

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(TwoCopies, OfTheLibraryInOneProcessAreDistinguished) {
  const auto path_one = lockstep::path_testing::from_program(COPY_ONE);
  const auto path_two = lockstep::path_testing::from_program(COPY_TWO);
  const Copy one(path_one.c_str()), two(path_two.c_str());
  ASSERT_TRUE(one.library != nullptr && two.library != nullptr);
  // Nobody has a world: nothing to say about copies.
  EXPECT_TRUE(says(two.call("copy_rank"), "call init_process_group first"));
  EXPECT_FALSE(says(two.call("copy_rank"), "another copy"));
  ASSERT_EQ(one.call("copy_init"), "");
  EXPECT_EQ(one.call("copy_rank"), "");
  // The usual symptom: initialised in one library, used in the other.
  const auto used = two.call("copy_rank");
  EXPECT_TRUE(says(used, "not initialised") && says(used, path_one) && says(used, path_two) &&
              says(used, "BUILD_SHARED_LIBS"))
      << used;
  const auto again = two.call("copy_init");
  EXPECT_TRUE(says(again, "twice") && says(again, path_one) && says(again, path_two)) << again;
  // One after the other they may.
  EXPECT_EQ(one.call("copy_destroy"), "");
  EXPECT_EQ(two.call("copy_init"), "");
  EXPECT_TRUE(says(one.call("copy_rank"), path_two));
  EXPECT_EQ(two.call("copy_destroy"), "");
}

}  // namespace
