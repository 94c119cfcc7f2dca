// For tests of what is Gloo's own. Ranks are forked processes; each sets its environment before it joins.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/path_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::comm::gloo_testing {

using testing::EngineRank;
using testing::FolderKv;
using testing::KvSpace;

inline const lockstep_engine& gloo_engine() {
  static const Engine engine = load_engine(path_testing::from_program(GLOO_PLUGIN));
  return engine.table();
}

// Runs body in a process per rank, each with its own copy of the test's state.
inline void on_processes(int size, const std::function<void(int rank, const lockstep_host*)>& body) {
  FolderKv kv;
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int r = 0; r < size; ++r) {
    pids.push_back(::fork());
    if (pids.back() != 0) continue;
    try {
      KvSpace space(kv, "gloo");
      body(r, space.host());
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  for (const pid_t pid : pids) {
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0) << "see the rank's own words above";
  }
}

// Local addresses of this process's IPv4 stream sockets, connected or listening.
inline std::multiset<std::string> local_addresses(bool connected) {
  std::multiset<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_in name{}, peer{};
    socklen_t length = sizeof name, peer_length = sizeof peer;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 || name.sin_family != AF_INET)
      continue;
    if ((::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0) != connected) continue;
    char text[INET_ADDRSTRLEN] = "";
    found.insert(::inet_ntop(AF_INET, &name.sin_addr, text, sizeof text));
  }
  return found;
}

// Until another rank has set the key.
inline void await(const lockstep_host* host, const char* key) {
  std::size_t length = 0;
  const auto patience = Deadline::after(testing::kPatience).monotonic_ns();
  EXPECT_EQ(host->kv_get(host->context, key, nullptr, 0, &length, patience), LOCKSTEP_OK);
}

inline void expect_sums(EngineRank& rank) {
  for (const std::size_t count : {3u, 3000u, 300'000u, 5u}) {
    std::vector<float> x(count, static_cast<float>(rank.rank() + 1));
    ASSERT_EQ(rank.all_reduce(x), LOCKSTEP_OK) << rank.error();
    const int n = rank.size();
    EXPECT_EQ(x, std::vector<float>(count, static_cast<float>(n * (n + 1) / 2)));
  }
}

}  // namespace lockstep::comm::gloo_testing
