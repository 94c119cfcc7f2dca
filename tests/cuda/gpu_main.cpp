// main of tests that need a GPU (lockstep_test(... GPU)). Without one the program says so in one line, in its report too,
// and ends with 77, which ctest counts as skipped.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/cuda/gpu_here.h"

namespace {

// As GoogleTest would name and write it, for tools/check_skips.py: GTEST_OUTPUT=xml:<folder>/.
void write_report(const std::string& program, const std::string& why) {
  const char* const output = std::getenv("GTEST_OUTPUT");
  const std::string target = output == nullptr ? "" : output;
  if (!target.starts_with("xml:") || !target.ends_with("/")) return;
  const std::filesystem::path folder = target.substr(4);
  auto path = folder / (program + ".xml");
  for (int i = 1; std::filesystem::exists(path); ++i)
    path = folder / (program + "_" + std::to_string(i) + ".xml");
  std::string text;
  for (const char c : why) text += c == '"' || c == '<' || c == '&' ? '\'' : c;
  std::ofstream(path) << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites><testsuite name=\"Gpu\">"
                      << "<testcase name=\"IsThere\" classname=\"Gpu\" status=\"run\" result=\"skipped\">"
                      << "<skipped message=\"" << text << "\"/></testcase></testsuite></testsuites>\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::string why = lockstep::cuda::why_no_gpu();
  if (!why.empty()) {
    std::printf("skipped: %s\n", why.c_str());
    write_report(std::filesystem::path(argv[0]).filename(), why);
    return 77;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
