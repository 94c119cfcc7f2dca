// Other versions of NCCL than the one the plug-in was written for: one that cannot revoke, and one that lets ranks share a GPU.
// The library is found once per process, so each runs in a child.
#include <sys/wait.h>

#include "engines/nccl/nccl_api.h"
#include "engines/nccl/nccl_testing.h"
#include "lockstep/base/fork_testing.h"
#include "tests/fake_nccl/fake_nccl.h"

namespace lockstep::nccl_plugin {
namespace {

void with_version(const char* version, const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("FAKE_NCCL_VERSION", version, 1);
    body();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);  // the fake driver joins its streams
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(base::describe_wait_status(status), "exited with code 0");
}

TEST(NcclVersions, WithoutRevokeAnAbortEndsStreamsAsWell) {
  with_version("22703", [] {
    on_ranks(2, [&](NcclRank& rank) {
      const auto x = rank.floats({1});
      ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
      if (rank.rank() == 0) {
        auto* const handle = rank.post(rank.all_reduce(x));
        ASSERT_EQ(plugin().stream_wait(handle, rank.stream()), LOCKSTEP_OK);
        plugin().comm_abort(rank.comm(), "enough");
        EXPECT_EQ(rank.finish(handle), LOCKSTEP_ABORTED) << rank.error();
      }
      EXPECT_TRUE(fork_testing::eventually([&] { return rank.stream_is_idle(); }));
      EXPECT_TRUE(fork_testing::eventually([&] { return rank.failure().status == LOCKSTEP_ABORTED; }));
    });
    EXPECT_EQ(fake_nccl_calls("ncclCommRevoke"), 0u);
    EXPECT_EQ(fake_nccl_calls("ncclCommAbort"), 2u);
    EXPECT_EQ(fake_nccl_comms(), 0);
  });
}

TEST(NcclVersions, ATooOldOneIsRefused) {
  with_version("21703", [] {
    on_ranks(1, {}, [](NcclRank& rank) {
      EXPECT_EQ(rank.status(), LOCKSTEP_UNSUPPORTED);
      EXPECT_NE(rank.error().find("2.17.3"), std::string::npos) << rank.error();
      EXPECT_NE(rank.error().find("2.18"), std::string::npos) << rank.error();
    });
  });
}

TEST(NcclVersions, RanksShareAGpuWhereNcclAllowsIt) {
  with_version("23203", [] {
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    on_ranks(2, {.device = 0}, [&](NcclRank& rank) {
      const auto x = rank.floats({3});
      ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
      EXPECT_EQ(x.get(), std::vector<float>{6});
    });
  });
}

TEST(NcclVersions, AnOldOneDoesNotLetThemShareItWhateverTheVariable) {
  with_version("22809", [] {
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    on_ranks(2, {.device = 0}, [&](NcclRank& rank) {
      const auto x = rank.floats({3});
      EXPECT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_UNSUPPORTED) << rank.error();
    });
  });
}

}  // namespace
}  // namespace lockstep::nccl_plugin
