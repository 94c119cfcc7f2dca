// init_process_group between two hosts: with no backend named, it is the hierarchical one. Ranks are
// processes in network namespaces, forked before anything starts a thread.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "lockstep/base/detail/process.h"
#include "lockstep/collective/collective.h"
#include "lockstep/store/file_store.h"
#include "tests/netns.h"

namespace lockstep {
namespace {

void use(int rank, int size, const std::string& expected) {
  EXPECT_EQ(get_backend(), expected);
  for (const int count : {3, 50'000, 1'000'000}) {
    const auto x = at::full({count}, rank + 1.0f);
    all_reduce(x, {.op = ReduceOp::kAvg});
    EXPECT_TRUE(at::equal(x, at::full({count}, static_cast<float>(size + 1) / 2)));
  }
  const auto all = at::empty({2 * size}, at::kLong);
  all_gather_into_tensor(all, at::full({2}, int64_t{rank}));
  for (int r = 0; r < size; ++r) EXPECT_EQ(all[2 * r + 1].item<int64_t>(), r);
  if (rank == 0) {
    const auto got = at::empty({1}, at::kLong);
    for (int i = 1; i < size; ++i) {
      const int from = recv(got).value();
      EXPECT_EQ(got.item<int64_t>(), 10 * from);
    }
  } else {
    send(at::full({1}, int64_t{10 * rank}), {.dst = 0});
  }
  const Group ends = new_group({0, size - 1});  // across
  const Group firsts = new_group({0, 1});       // on one host
  const auto y = at::full({100}, 1.0f);
  if (rank == 0 || rank == size - 1) all_reduce(y, {.group = ends});
  if (rank < 2) all_reduce(y, {.group = firsts});
  EXPECT_EQ(y[99].item<float>(), rank < 2 ? 3.f : rank == size - 1 ? 2.f : 1.f) << rank;
}

void run(const std::string& backend, int size, int on_first) {
  std::string why;
  const auto hosts = testing::TwoHosts::make(why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  const std::string file = ::testing::TempDir() + "hierarchical_group_" + base::random_hex(8);
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        hosts->enter(rank < on_first ? 0 : 1);
        ::setenv("MASTER_ADDR", hosts->address(0).c_str(), 1);
        init_process_group(
            {.backend = backend, .world_size = size, .rank = rank, .store = FileStore::open(file)});
        use(rank, size, "hierarchical");
        barrier();
        destroy_process_group();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      std::fflush(nullptr);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    pids.push_back(pid);
  }
  for (const pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(base::describe_wait_status(status), "exited with code 0");
  }
  std::filesystem::remove(file);
}

TEST(HierarchicalGroup, IsWhatANamelessBackendMeansBetweenHosts) {
  run("", 4, 2);
}
TEST(HierarchicalGroup, CanBeNamedAndHostsMayDifferInSize) {
  run("hierarchical", 3, 2);
}

}  // namespace
}  // namespace lockstep
