// Ranks that are killed or stopped in the middle of collectives on CUDA tensors: the survivors learn who it was, and
// go on in a new group. The test process itself never touches a GPU: it forks the ranks.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "lockstep/base/fork_testing.h"
#include "tests/gpu/gpu_testing.h"

namespace lockstep {
namespace {

using gpu_testing::gpu;
using gpu_testing::on_gpu;

constexpr int kRanks = 3, kVictim = 2;

struct Board {
  std::atomic<int> ready{0};  // ranks that have made their first collectives
  std::atomic<int> pid[kRanks]{};
  std::atomic<std::int64_t> struck_ns{0};  // when the victim was killed or stopped
  std::atomic<std::int64_t> told_ns[kRanks]{};
};

std::string engine() {
  const char* const given = std::getenv("GPU_TEST_BACKEND");
  return given == nullptr ? "cuda:cuda_ipc" : given;
}

std::int64_t now_ns() {
  return Deadline::now().monotonic_ns();
}

// Runs collectives until one fails, on the host's side or on the device's.
Error failing_collectives(at::Tensor& x, std::optional<Milliseconds> timeout) {
  try {
    for (;;) {
      all_reduce(x, {.timeout = timeout});
      gpu_testing::synchronize();
    }
  } catch (const Error& error) {
    return error;
  }
}

class FaultGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/dev/nvidiactl"))
      GTEST_SKIP() << "no GPU: no NVIDIA device on this machine";
  }

  void strike(int signal, ErrorKind expected, std::optional<Milliseconds> timeout) {
    const auto folder =
        std::filesystem::temp_directory_path() / ("lockstep-gpu-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const fork_testing::Shared<Board> board;
    fork_testing::Children children;
    for (int rank = 0; rank < kRanks; ++rank)
      children.start([&, rank] { be(rank, *board, folder.string(), expected, timeout); });
    ASSERT_TRUE(fork_testing::eventually([&] { return board->ready == kRanks; }));
    board->struck_ns = now_ns();
    ::kill(board->pid[kVictim], signal);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == kVictim) continue;
      EXPECT_EQ(children.status(rank), 0) << "rank " << rank;
      const double seconds = static_cast<double>(board->told_ns[rank] - board->struck_ns) * 1e-9;
      std::printf("rank %d knew after %.3f s\n", rank, seconds);
    }
    std::filesystem::remove_all(folder);
  }

 private:
  static void be(int rank, Board& board, const std::string& folder, ErrorKind expected,
                 std::optional<Milliseconds> timeout) {
    std::string why;
    CHILD_EXPECT(cuda::load(&why), why);
    cuda::set_device(0);
    init_process_group({.backend = engine(),
                        .init_method = "file://" + folder + "/world",
                        .timeout = gpu_testing::kPatience,
                        .world_size = kRanks,
                        .rank = rank});
    auto x = torch::ones({1 << 20}, on_gpu());
    for (int i = 0; i < 3; ++i) all_reduce(x);
    gpu_testing::synchronize();
    board.pid[rank] = ::getpid();
    ++board.ready;
    if (rank == kVictim) {
      for (;;) ::pause();  // the others wait for its next collective
    }
    const Error error = failing_collectives(x, timeout);
    board.told_ns[rank] = now_ns();
    const std::string text = error.what();
    CHILD_EXPECT(error.kind() == expected, text);
    CHILD_EXPECT(text.find("rank 2") != std::string::npos, text);
    abort_process_group();
    const auto again = create_group({.store = FileStore::open(folder + "/again"),
                                     .rank = rank,
                                     .size = 2,
                                     .name = "survivors",
                                     .backend = engine(),
                                     .timeout = gpu_testing::kPatience});
    auto y = torch::full({1000}, rank + 1, on_gpu());
    all_reduce(y, {.group = again});
    CHILD_EXPECT(torch::all(y == 3).item<bool>(), "the survivors' sum");
    destroy_process_group(again);
  }
};

TEST_F(FaultGpu, AKilledRankIsNamedAndTheSurvivorsGoOn) {
  strike(SIGKILL, ErrorKind::kPeerLost, {});
}

TEST_F(FaultGpu, AStoppedRankEndsInATimeoutThatNamesItAndTheOthersGoOn) {
  strike(SIGSTOP, ErrorKind::kTimeout, Milliseconds(1000));
}

}  // namespace
}  // namespace lockstep
