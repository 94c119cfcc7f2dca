// Worlds of processes for the scenarios: RPC over a file store with a strict check for leaked RRefs.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/process/testing.h"

namespace lockstep::scenario {

// In a worker process: what is thrown becomes the parent's SpawnError.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline void require_equal(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  require(a.defined() && b.defined() && torch::equal(a, b),
          what + (a.defined() && b.defined() ? ": " + c10::str(a, " and ", b) : ": one is undefined"));
}

inline std::string worker(int rank) {
  return "worker" + std::to_string(rank);
}

// Sleeps for up to a few milliseconds, often not at all.
class Delays {
 public:
  explicit Delays(int seed) : random_(static_cast<unsigned>(seed)) {}
  void operator()() {
    if (random_() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
  }

 private:
  std::mt19937 random_;
};

// Where the processes of one world meet.
struct Meeting {
  std::string rpc;    // URL
  std::string group;  // URL; the same file unless said otherwise
};

// Runs body(rank, meeting) in n processes, each a worker "worker<rank>".
inline void run_workers(int n, const std::function<void(int rank, const Meeting& meeting)>& body,
                        const std::string& group_suffix = "") {
  const process_testing::TemporaryFolder folder;
  const std::string url = "file://" + folder.file("store");
  const Meeting meeting{.rpc = url, .group = url + group_suffix};
  spawn(n, [&](int rank) {
    torch::set_num_threads(1);
    init_rpc(worker(rank),
             {.init_method = meeting.rpc, .rank = rank, .world_size = n, .strict_rref_check = true});
    body(rank, meeting);
    rpc::shutdown();
  });
}

inline void enter_group(int rank, int n, const Meeting& meeting) {
  init_process_group({.init_method = meeting.group, .world_size = n, .rank = rank});
}

}  // namespace lockstep::scenario
