// The host engine where memory is refused in the middle of a call: the operation fails, and neither its
// communicator nor the thread that serves it stops working. Memory is refused by a replaced operator new.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstring>

#include "lockstep/base/long_testing.h"
#include "lockstep/base/refused_memory_testing.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/test_world.h"

namespace {

// Which of the coming allocations are refused: the one after `left` more and, if `lasting`, all after it.
struct Refusal {
  std::atomic<int> left{-1};  // -1: none is refused
  std::atomic<bool> lasting{false};
  std::atomic<bool> happened{false};

  void begin(int n, bool all_after) {
    lasting = all_after;
    happened = false;
    left = n;
  }
  bool refuses() {
    if (left.load() < 0) return false;
    if (left.load() > 0) {
      left.fetch_sub(1);
      return false;
    }
    if (!lasting) left = -1;
    happened = true;
    return true;
  }
};

thread_local Refusal* mine = nullptr;  // of the thread that called
Refusal of_worker;                     // of the threads that serve posted operations

bool is_worker() {
  char name[16] = "";
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  return std::strcmp(name, "ls-progress") == 0;
}

}  // namespace

bool lockstep::testing::refuse_allocation() {
  return (mine != nullptr && mine->refuses()) ||
         (of_worker.left.load() >= 0 && is_worker() && of_worker.refuses());
}

namespace lockstep::comm {
namespace {

using testing::Rank;

constexpr int kMost = 1000;                              // more allocations than any call makes
constexpr int kStep = long_testing::kUnderTsan ? 7 : 1;  // which makes a world of ranks slow
constexpr Milliseconds kOpPatience{20'000};

// What one rank calls; ranks are 0 and 1.
struct Call {
  const char* name;
  lockstep_op_kind kind;
  std::uint64_t count;
  bool rows = false;
  bool alone = false;  // rank 1 never calls: it ends by its deadline
};

// The buffers and the call of one rank.
class Made {
 public:
  Made(const Call& call, int me)
      : in_(2 * call.count, 1.0f), out_(2 * call.count), counts_{call.count, call.count} {
    auto kind = call.kind;
    if (kind == LOCKSTEP_SEND && me == 1) kind = LOCKSTEP_RECV;
    op_ = Rank::op(kind, in_.data(), out_.data(), call.count, LOCKSTEP_F32,
                   call.alone ? Milliseconds(20) : kOpPatience);
    op_.send_counts = op_.recv_counts = counts_;
    if (kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV) op_.root = 1 - me;
    if (call.rows) op_.send_rows = op_.recv_rows = 2;
  }
  const lockstep_op& op() const { return op_; }

 private:
  std::vector<float> in_, out_;
  std::uint64_t counts_[2];
  lockstep_op op_;
};

constexpr Call kCalls[] = {{"a small all_reduce", LOCKSTEP_ALL_REDUCE, 4},
                           {"a large all_reduce", LOCKSTEP_ALL_REDUCE, 100'000},
                           {"all_to_all_v with rows", LOCKSTEP_ALL_TO_ALL_V, 50'000, true},
                           {"a short message", LOCKSTEP_SEND, 4},
                           {"a long message", LOCKSTEP_SEND, 100'000},
                           {"a late all_reduce", LOCKSTEP_ALL_REDUCE, 4, false, true},
                           {"a late message", LOCKSTEP_SEND, 100'000, false, true}};

// How rank 0 makes its call while allocations are refused.
using Way = lockstep_status (*)(Rank&, const lockstep_op&, Refusal&, int n, bool lasting);

template <auto call>
lockstep_status by_caller(Rank& rank, const lockstep_op& op, Refusal& refusal, int n, bool lasting) {
  refusal.begin(n, lasting);
  mine = &refusal;
  const auto status = (rank.*call)(op);
  mine = nullptr;
  return status;
}

// No thread waits: the worker does all of it.
lockstep_status by_worker(Rank& rank, const lockstep_op& op, Refusal& refusal, int n, bool lasting) {
  of_worker.begin(n, lasting);
  lockstep_handle* const handle = rank.post(op);
  const Deadline deadline = Deadline::after(kOpPatience);
  while (rank.table().test(handle) == LOCKSTEP_PENDING && !deadline.expired()) ::usleep(100);
  const auto status = rank.table().test(handle);
  rank.table().release(handle);
  refusal.happened = of_worker.happened.load();
  of_worker.left = -1;
  return status;
}

// Whatever became of the call, the next operation ends, well or not.
void expect_next_ends(Rank& rank) {
  lockstep_handle* const handle = rank.post(Rank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0));
  rank.table().wait(handle, Deadline::after(kOpPatience).monotonic_ns());
  EXPECT_NE(rank.table().test(handle), LOCKSTEP_PENDING) << "rank " << rank.rank() << " is stuck";
  rank.table().release(handle);
}

// False when the call makes fewer than n allocations.
bool refuse_nth(const Call& call, Way way, int n, bool lasting) {
  Refusal refusal;
  std::atomic<bool> over{false};
  testing::with_threads(2, [&](Rank& rank) {
    const Made made(call, rank.rank());
    if (rank.rank() == 0) {
      const auto status = way(rank, made.op(), refusal, n, lasting);
      EXPECT_NE(status, LOCKSTEP_PENDING) << call.name << ", allocation " << n << ": it never ends";
      EXPECT_TRUE(status == LOCKSTEP_OK || refusal.happened || call.alone) << rank.error();
      EXPECT_FALSE(call.alone && status == LOCKSTEP_OK)
          << call.name << ", allocation " << n << ": nobody took it";
      // It may have failed before the other rank could notice.
      if (status != LOCKSTEP_OK) rank.table().comm_abort(rank.comm(), "no memory");
      over = true;
    } else if (!call.alone) {
      rank.run(made.op());
    }
    for (const Deadline deadline = Deadline::after(kOpPatience); !over && !deadline.expired();) ::usleep(100);
    expect_next_ends(rank);
  });
  return refusal.happened;
}

class HostMemory : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { internal::pretend_processes = true; }
  void TearDown() override { internal::pretend_processes = false; }
  void refuse_each(Way way) {
    for (const Call& call : kCalls) {
      for (int n = 0; n < kMost && !HasFailure(); n += kStep) {
        if (!refuse_nth(call, way, n, GetParam())) break;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Refused, HostMemory, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "FromThenOn" : "Once"; });

TEST_P(HostMemory, ACallThatFindsNoneEndsAndSoDoesTheNext) {
  refuse_each(by_caller<&Rank::run>);
}
TEST_P(HostMemory, APostedOperationThatFindsNoneEndsAndSoDoesTheNext) {
  refuse_each(by_caller<&Rank::post_and_wait>);
}
TEST_P(HostMemory, AWorkerThatFindsNoneEndsTheOperationAndGoesOn) {
  refuse_each(by_worker);
}

}  // namespace
}  // namespace lockstep::comm
