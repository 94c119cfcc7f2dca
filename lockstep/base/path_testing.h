// For tests: files of the build and of the repository, by their path from the folder of the running program
// (lockstep_test_path of cmake/Lockstep.cmake). That path is the same in every clone, so that the compiler
// cache recognises the test in each.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::path_testing {

inline std::string from_program(const std::string& path) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / path).lexically_normal().string();
}

}  // namespace lockstep::path_testing
