// Helpers of the process tests: a folder of its own, waiting for files and for processes to go. Every wait is
// bounded; none asserts how long something took.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/fork_testing.h"

extern char** environ;

namespace lockstep::process_testing {

using fork_testing::eventually;
using fork_testing::kPatience;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::vector<std::string> own_environment() {
  std::vector<std::string> list;
  for (char** entry = environ; *entry != nullptr; ++entry) list.emplace_back(*entry);
  return list;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The pid a script wrote with `echo $$ > file` or the like; 0 when it never came.
inline pid_t pid_in(const std::string& path) {
  pid_t pid = 0;
  eventually([&] {
    const std::string text = read_file(path);
    if (text.empty() || text.back() != '\n') return false;
    std::istringstream(text) >> pid;
    return pid > 0;
  });
  return pid;
}

// Gone, or a zombie that its parent has yet to collect.
inline bool is_dead(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos || stat[name_end + 2] == 'Z' || stat[name_end + 2] == 'X';
}

inline bool dies(pid_t pid) {
  return eventually([=] { return is_dead(pid); });
}

}  // namespace lockstep::process_testing
