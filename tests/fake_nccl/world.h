// The communicators of the fake NCCL and the operations they wait in.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_nccl/reduce.h"

namespace lockstep::fake_nccl {

using nccl_plugin::DataType;
using nccl_plugin::RedOp;
using nccl_plugin::Result;

enum class Kind : std::uint8_t { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kRecv };

// One call, on one rank. Pointers are of the device.
struct Task {
  Kind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  DataType type = nccl_plugin::kUint8;
  RedOp op = nccl_plugin::kSum;
  int root = 0;              // or the peer
  std::uint64_t number = 0;  // collectives: the how-manieth of the communicator; given when it runs
  bool done = false;         // by World::mutex
};

// What the ranks of one unique id share.
struct World {
  explicit World(int n) : size(n) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> joined;
  std::map<std::uint64_t, std::map<int, Task*>> collectives;         // by number, by rank: those that wait
  std::map<std::pair<int, int>, std::deque<Task*>> sends, receives;  // by sender and receiver

  // Puts the task beside its peers', and performs it when the last has come. Pre: mutex.
  void arrive(int rank, Task& task);
  // Takes back what has not been performed. Pre: mutex.
  void withdraw(int rank, Task& task);

 private:
  void perform(const std::map<int, Task*>& all);
  void match(const std::pair<int, int>& pair);
};

// A communicator: nccl_plugin::Comm points to one. Never freed: kernels that were enqueued still look at it.
struct FakeComm {
  std::shared_ptr<World> world;
  int rank = 0;
  void* function = nullptr;  // CUfunction of its kernel
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};      // kernels
  std::uint64_t n_collectives = 0;  // by World::mutex

  std::mutex mutex;
  Result state = nccl_plugin::kInProgress;
  int polls_left = 0;  // until what is in progress has settled
  std::set<Kind> connected;
  struct Launch {
    FakeComm* comm;
    void* stream;
    std::vector<Task> tasks;
  };
  std::vector<std::unique_ptr<Launch>> deferred;  // launched when it settles
};

// The kernel: waits for the peers of all tasks of the launch. May run again, from a graph.
void run(const FakeComm::Launch& launch);

}  // namespace lockstep::fake_nccl
