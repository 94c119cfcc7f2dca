// What a world costs by its number of ranks: entering it, groups of all ranks, their first all_reduce,
// barriers, leaving; memory and descriptors. Every request makes a fresh world, of processes or of threads,
// in children of this program, which itself keeps one thread so that it can fork.
//
// A phase is what all ranks do k times in a row. Its time is from the first rank's start to the last rank's
// end, over k: ranks that take turns on a few cores start and end at different moments.
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_array.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/collective.h"

namespace bench {
namespace {

constexpr int kMaxRanks = 256;
constexpr int kGroups = 8;
constexpr int kBarriers = 30;

enum Phase { kInit, kBarrier, kNewGroup, kFirst, kDestroy, kLeave, kPhases };
constexpr const char* kNames[] = {"init", "barrier", "new_group", "first_all_reduce", "destroy", "leave"};
constexpr int kTimes[] = {1, kBarriers, kGroups, kGroups, kGroups, 1};

// One rank's numbers, in memory that this program shares with its children.
struct Numbers {
  std::int64_t begin[kPhases], end[kPhases];
  std::int64_t cpu[kPhases];  // processor time of the rank's process; of processes only
  std::int64_t pss_kib;       // a rank's part of the process's memory: what the world added
  std::int64_t fds;           // descriptors that the world added
  bool well;
};

std::int64_t pss_kib() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string word; in >> word;) {
    std::int64_t value = 0;
    if (word == "Pss:" && in >> value) return value;
  }
  return 0;
}

std::int64_t open_fds() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

std::int64_t cpu_ns() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return used.tv_sec * 1'000'000'000 + used.tv_nsec;
}

template <class Body>
void phase(Numbers& mine, Phase phase, Body body) {
  mine.cpu[phase] = -cpu_ns();
  mine.begin[phase] = now_ns();
  body();
  mine.end[phase] = now_ns();
  mine.cpu[phase] += cpu_ns();
}

// Everything between init and leave.
void inside(Numbers& mine) {
  at::Tensor x = at::ones({1024});
  lockstep::barrier();
  phase(mine, kBarrier, [&] {
    for (int k = 0; k < kBarriers; ++k) lockstep::barrier();
  });
  std::vector<lockstep::Group> groups;
  lockstep::barrier();
  phase(mine, kNewGroup, [&] {
    for (int k = 0; k < kGroups; ++k) groups.push_back(lockstep::new_group());
  });
  lockstep::barrier();
  phase(mine, kFirst, [&] {
    for (const auto& group : groups) lockstep::all_reduce(x, {.group = group});
  });
  const double size = lockstep::get_world_size();
  double expected = 1;
  for (int k = 0; k < kGroups; ++k) expected *= size;
  mine.well = x[0].item<double>() == static_cast<double>(static_cast<float>(expected)) && expected > 0;
  lockstep::barrier();
  phase(mine, kDestroy, [&] {
    for (auto& group : groups) lockstep::destroy_process_group(std::move(group));
  });
  lockstep::barrier();
}

std::uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&at), length) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0)
    throw std::runtime_error("no free port");
  ::close(fd);
  return ntohs(at.sin_port);
}

void be_process(int rank, int size, std::uint16_t port, Numbers& mine) {
  const auto fds = open_fds(), memory = pss_kib();
  phase(mine, kInit, [&] {
    lockstep::init_process_group(
        {.init_method = lockstep::base::cat("tcp://127.0.0.1:", port), .world_size = size, .rank = rank});
  });
  inside(mine);
  mine.fds = open_fds() - fds;
  mine.pss_kib = pss_kib() - memory;
  lockstep::barrier();
  phase(mine, kLeave, [] { lockstep::destroy_process_group(); });
}

void be_threads(int size, SharedArray<Numbers>& numbers) {
  const auto fds = open_fds(), memory = pss_kib();
  const std::int64_t begin = now_ns();
  lockstep::run_threads(size, [&](int rank) {
    Numbers& mine = numbers[static_cast<std::size_t>(rank)];
    mine.begin[kInit] = begin;
    mine.end[kInit] = now_ns();
    inside(mine);
    if (rank == 0) mine.fds = (open_fds() - fds) / size;
    if (rank == 0) mine.pss_kib = (pss_kib() - memory) / size;
    lockstep::barrier();
    phase(mine, kLeave, [] { lockstep::destroy_process_group(); });
  });
}

// Children that wait until all of them are there, and are then let go at once.
template <class Body>
void in_children(int n, Body body) {
  int gate[2], ready[2];
  if (::pipe(gate) != 0 || ::pipe(ready) != 0) throw std::runtime_error("no pipe");
  std::vector<pid_t> children;
  char byte = 0;
  for (int i = 0; i < n; ++i) {
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("no process for a rank");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(gate[1]);
      if (::write(ready[1], &byte, 1) != 1 || ::read(gate[0], &byte, 1) != 0) ::_exit(1);
      try {
        body(i);
      } catch (const std::exception& error) {
        std::cerr << "rank " << i << ": " << error.what() << std::endl;
        ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (int i = 0; i < n; ++i) {
    if (::read(ready[0], &byte, 1) != 1) throw std::runtime_error("a rank did not start");
  }
  ::usleep(20'000);  // the last ones reach the gate
  for (const int fd : {gate[0], gate[1], ready[0], ready[1]}) ::close(fd);
  bool well = true;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    well = well && status == 0;
  }
  if (!well) throw std::runtime_error("a rank failed");
}

std::string measure(const Request& request) {
  const int size = static_cast<int>(request.number("ranks"));
  if (size < 1 || size > kMaxRanks) throw std::runtime_error("ranks must be 1 to 256");
  const bool processes = request.text("kind") == "processes";
  SharedArray<Numbers> numbers(kMaxRanks);
  if (processes) {
    const std::uint16_t port = free_port();
    in_children(size,
                [&](int rank) { be_process(rank, size, port, numbers[static_cast<std::size_t>(rank)]); });
  } else {
    in_children(1, [&](int) { be_threads(size, numbers); });
  }
  std::ostringstream answer;
  answer << "{";
  double fds = 0, memory = 0;
  for (int p = 0; p < kPhases; ++p) {
    std::int64_t first = numbers[0].begin[p], last = numbers[0].end[p];
    for (int r = 1; r < size; ++r) {
      first = std::min(first, numbers[static_cast<std::size_t>(r)].begin[p]);
      last = std::max(last, numbers[static_cast<std::size_t>(r)].end[p]);
    }
    if (processes) {
      std::int64_t cpu = 0;
      for (int r = 0; r < size; ++r) cpu += numbers[static_cast<std::size_t>(r)].cpu[p];
      answer << "\"" << kNames[p] << "_cpu\":" << static_cast<double>(cpu) / 1e3 / kTimes[p] << ",";
    }
    answer << "\"" << kNames[p] << "\":" << static_cast<double>(last - first) / 1e3 / kTimes[p] << ",";
  }
  for (int r = 0; r < size; ++r) {
    const Numbers& one = numbers[static_cast<std::size_t>(r)];
    if (!one.well) throw std::runtime_error("a sum was wrong");
    fds += static_cast<double>(one.fds) / (processes ? size : 1);
    memory += static_cast<double>(one.pss_kib) / (processes ? size : 1);
  }
  answer << "\"fds\":" << fds << ",\"kib\":" << memory << "}";
  return answer.str();
}

}  // namespace
}  // namespace bench

int main() {
  return bench::run_main(0, nullptr, [](const bench::Request&) {
    std::cout << "{\"ready\":true}" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      std::string answer;
      try {
        answer = bench::measure(bench::Request(line));
      } catch (const std::exception& error) {
        answer = bench::error_reply(error.what());
      }
      std::cout << answer << std::endl;
    }
    return 0;
  });
}
