// The contract suite of engines: what every engine must do behind the C table, written once in
// engine_contract*.cpp. It asks capabilities() and skips what an engine does not offer. To add an engine, say
// how to reach its table and how to start ranks, and link the object library:
//
//   INSTANTIATE_TEST_SUITE_P(MyEngine, EngineContract,
//                            testing::Values(EngineKind{.name = "threads", .table = my_engine}), kind_name);
//
//   lockstep_test(my_contract_test SOURCES my_contract_test.cpp DEPENDS my engine LINK engine_contract)
//
// With EngineKind::memory all buffers are on a device. An engine that takes device memory instantiates
// EngineDeviceContract too, with the same kinds: the order between operations and streams.
//
// Ranks are threads, or processes forked from the test (then the program must not start a thread before: put
// processes in a test program of their own). Inside a rank's body gtest assertions work in both. For tests
// only; not installed.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "lockstep/base/fork_testing.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/engine/engine.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::comm {

// Sanitizers make large buffers expensive, and processes slow to start.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// One rank, a pair, a power of two, an odd number; the long tests add the sizes in between and above. For
// races: a pair, a third rank, more ranks than cores.
inline std::vector<int> contract_sizes() {
  if (long_testing::enabled()) return {1, 2, 3, 4, 7, 8};
  return long_testing::kUnderTsan ? std::vector<int>{2, 3, 7} : std::vector<int>{1, 2, 4, 7};
}
// Of ranks that are processes: a pair and, where they are on two hosts, uneven and even halves. The threads'
// suites have the rest.
inline std::vector<int> process_sizes() {
  if (long_testing::enabled()) return contract_sizes();
  if (long_testing::kUnderTsan) return {3};
  return kSanitized ? std::vector<int>{2, 4} : std::vector<int>{2, 3, 4};
}

struct EngineKind {
  std::string name;
  const lockstep_engine* (*table)() = nullptr;
  enum class Ranks : std::uint8_t { kThreads, kProcesses } ranks = Ranks::kThreads;
  std::vector<int> sizes = contract_sizes();
  // Reductions run in rank order, so a plain loop gives the same bits.
  bool rank_order = false;
  // Calls that differ between ranks are an error on all of them. Engines without it may hang until the
  // deadline.
  bool compares_calls = true;
  // Must offer every operation, element type and reduction.
  bool everything = false;
  // Runs where the rank will, before it joins: enter a network namespace, take on another host's name.
  std::function<void(int rank, int size)> enter = nullptr;
  // Where the rank's buffers are, made where the rank will run (after enter); null: in host memory.
  std::function<std::unique_ptr<testing::TestMemory>(int rank, int size)> memory = nullptr;
  // run on device memory may wait until the streams of all ranks have arrived: the engine submits no earlier.
  bool run_awaits_streams = false;
  // The most threads that 200 idle communicators of one rank may add; 0: not asked.
  int max_idle_threads = 0;

  friend std::ostream& operator<<(std::ostream& out, const EngineKind& kind) { return out << kind.name; }
};

inline std::string kind_name(const ::testing::TestParamInfo<EngineKind>& info) {
  return info.param.name;
}

// Memory words that ranks share whether they are threads or processes, beside the engine under test.
struct Board {
  std::atomic<std::uint64_t> words[64];
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> round;
};

// One rank of a test: its end of the world's communicator, and the means to make more.
class ContractRank : public testing::EngineRank {
 public:
  ContractRank(const lockstep_engine& table, testing::Kv& kv, testing::KvSpace& space, Board& board, int rank,
               int size, testing::TestMemory* memory)
      : EngineRank(table, space.host(), rank, size, {.name = "world", .memory = memory}),
        kv_(kv),
        board_(board) {}

  std::atomic<std::uint64_t>& word(int index) { return board_.words[index]; }
  // A barrier of all ranks that does not use the engine.
  void meet();
  // Until word(index) is at least `value`.
  void await(int index, std::uint64_t value);

  // A communicator of `members` (ranks of the world, in the new order); only they call. `parent`: hands the
  // world's communicator to the engine to build on.
  struct Member;
  std::unique_ptr<Member> sub(const std::string& name, const std::vector<int>& members, bool parent);

  // Waits or runs, as `posted` says.
  lockstep_status call(const lockstep_op& op, bool posted) { return posted ? post_and_wait(op) : run(op); }

 private:
  testing::Kv& kv_;
  Board& board_;
};

struct ContractRank::Member {
  Member(const lockstep_engine& table, testing::Kv& kv, const std::string& name, int rank, int size,
         const testing::EngineRank::Options& options)
      : space(kv, name), end(table, space.host(), rank, size, options) {}
  testing::KvSpace space;
  testing::EngineRank end;
};

class EngineContract : public ::testing::TestWithParam<EngineKind> {
 protected:
  using Rank = ContractRank;
  using Body = std::function<void(Rank&)>;

  void SetUp() override;

  const Engine& engine() const { return *engine_; }
  bool offers(std::initializer_list<lockstep_op_kind> kinds) const {
    for (const auto kind : kinds) {
      if (!engine_->offers(kind)) return false;
    }
    return true;
  }
  bool on_device() const { return GetParam().memory != nullptr; }
  bool has_alloc() const {
    return on_device() ? engine_->table().alloc_on != nullptr : engine_->table().alloc != nullptr;
  }
  bool processes() const { return GetParam().ranks == EngineKind::Ranks::kProcesses; }

  // Runs body on every rank of a fresh world and waits for all.
  void on_ranks(int size, const Body& body);
  void on_all_sizes(const Body& body) {
    for (const int size : GetParam().sizes) {
      if (!HasFailure()) on_ranks(size, body);
    }
  }

  // For tests that lose ranks. Pre: processes(). Starts them and returns at once.
  std::vector<pid_t> start_processes(int size, const Body& body);
  // How a process ended, as text; killed when it does not end.
  static std::string end_of(pid_t pid);
  Board& board() { return *board_; }

 private:
  void clear_board();
  void be(int rank, int size, testing::Kv& kv, const Body& body);

  std::unique_ptr<Engine> engine_;
  const fork_testing::Shared<Board> board_;
  std::unique_ptr<testing::Kv> kv_;
};

// The tests about streams, in engine_contract_device.cpp. Pre: the kinds have a memory.
class EngineDeviceContract : public EngineContract {};

// First line of a test: skips it where the engine lacks one of the kinds.
#define LOCKSTEP_CONTRACT_NEEDS(...)                   \
  do {                                                 \
    if (!offers({__VA_ARGS__})) {                      \
      GTEST_SKIP() << "this engine does not offer it"; \
    }                                                  \
  } while (false)

}  // namespace lockstep::comm
