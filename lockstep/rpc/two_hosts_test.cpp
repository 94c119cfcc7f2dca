// Workers on two hosts (network namespaces joined by a cable): shared memory inside a host and TCP across, in
// one group.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "lockstep/net/secret.h"
#include "lockstep/rpc/process_testing.h"
#include "tests/netns.h"

namespace lockstep::rpc {
namespace {

using testing::Board;
using testing::Children;
using testing::require;

constexpr int kWorld = 4;

std::vector<double> doubled(std::vector<double> values) {
  for (auto& value : values) value *= 2;
  return values;
}
LOCKSTEP_RPC_FUNCTION(doubled, "two_hosts_test.doubled");

// Over to the next worker, which is on another host half of the time, and back.
double around(const RRef<double>& value, int n) {
  if (n == 0) return value.to_here();
  const int next = (current_agent("test")->self().id + 1) % kWorld;
  return 1 + rpc_sync(next, around, {value, n - 1});
}
LOCKSTEP_RPC_FUNCTION(around, "two_hosts_test.around");

// Where the workers meet.
enum class Meeting : std::uint8_t { kEnvironment, kUrl };

class TwoHosts : public ::testing::TestWithParam<Meeting> {
 protected:
  void SetUp() override {
    if (lockstep::testing::two_hosts() == nullptr) GTEST_SKIP() << "needs root and network namespaces";
    secret_ = (std::filesystem::temp_directory_path() / ("lockstep-secret-" + base::random_hex(8))).string();
    JobSecret::mint().write_file(secret_);
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove(secret_, ignored);
  }

  // Workers 0 and 1 are on one host, 2 and 3 on the other.
  testing::ChildrenOptions on_two_hosts() const {
    return {.change = [this](RpcOptions& options) {
      lockstep::testing::enter_half(options.rank.value(), kWorld);
      ::setenv("LOCKSTEP_SECRET_FILE", secret_.c_str(), 1);
      options.store = nullptr;
      if (GetParam() == Meeting::kEnvironment) {
        ::setenv("MASTER_PORT", "29555", 1);
      } else {
        ::unsetenv("MASTER_ADDR");
        options.init_method = base::cat("tcp://", lockstep::testing::two_hosts()->address(0), ":29555");
      }
    }};
  }

  std::string secret_;
};
INSTANTIATE_TEST_SUITE_P(Rpc, TwoHosts, ::testing::Values(Meeting::kEnvironment, Meeting::kUrl),
                         [](const auto& test) {
                           return test.param == Meeting::kUrl ? "Url" : "Environment";
                         });

TEST_P(TwoHosts, CallEachOtherAndShareReferences) {
  Children workers(
      kWorld,
      [](int rank, Board&) {
        for (const std::size_t n : {1u, 1000u, 300'000u}) {
          for (int to = 0; to < kWorld; ++to) {
            std::vector<double> values(n);
            std::iota(values.begin(), values.end(), rank);
            const auto answer = rpc_sync(to, doubled, {values});
            for (auto& value : values) value *= 2;
            require(answer == values, base::cat(n, " numbers from worker ", to));
          }
        }
        const RRef<double> mine(100.0 + rank);
        require(around(mine, 2 * kWorld) == 100.0 + rank + 2 * kWorld, "a reference that went around twice");
        shutdown();
      },
      on_two_hosts());
  workers.expect_end();
}

TEST_P(TwoHosts, SurvivorsOnBothHostsLearnOfADeath) {
  constexpr int kVictim = 3;
  Children workers(
      kWorld,
      [](int rank, Board& board) {
        rpc_sync(kVictim, doubled, {std::vector<double>{1}});
        ++board.counters[0];
        if (rank == kVictim) {
          for (;;) ::pause();
        }
        try {
          for (;;) rpc_sync(kVictim, doubled, {std::vector<double>{1, 2, 3}});
        } catch (const Error& error) {
          require(error.kind() == ErrorKind::kPeerLost, error.what());
          require(std::string(error.what()).find("worker3") != std::string::npos, error.what());
        }
        for (int to = 0; to < kVictim; ++to) {
          require(rpc_sync(to, doubled, {std::vector<double>{4}}) == std::vector<double>{8},
                  "survivors go on");
        }
        shutdown();
      },
      on_two_hosts());
  const Deadline deadline = Deadline::after(Milliseconds(60'000));
  while (workers.board().counters[0] < kWorld && !deadline.expired()) ::usleep(500);
  workers.kill(kVictim);
  workers.expect_end({kVictim});
}

}  // namespace
}  // namespace lockstep::rpc
