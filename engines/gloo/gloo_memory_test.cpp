// The Gloo engine where memory is refused in the middle of a blocking call: the call fails, and the next one
// does not wait for it. One rank alone, so that libgloo's own threads are not concerned. Memory is refused by a
// replaced operator new, which the plug-in uses too.
#include <gtest/gtest.h>

#include "lockstep/base/path_testing.h"
#include "lockstep/base/refused_memory_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/engine/test_world.h"

namespace {

thread_local int n_left = -1;  // allocations of this thread until one is refused; -1: none is
thread_local bool refused = false;

}  // namespace

bool lockstep::testing::refuse_allocation() {
  if (n_left < 0) return false;
  refused = n_left-- == 0;
  return refused;
}

namespace lockstep::comm {
namespace {

using testing::EngineRank;

// How the call ends when its n-th allocation is refused.
lockstep_status refuse_nth(EngineRank& end, int n) {
  std::vector<float> in(4, 1.0f), out(4);
  const std::uint64_t counts[1] = {4};
  auto op = EngineRank::op(LOCKSTEP_ALL_TO_ALL_V, in.data(), out.data(), 0);
  op.send_counts = op.recv_counts = counts;
  refused = false;
  n_left = n;
  const auto status = end.run(op);
  n_left = -1;
  return status;
}

TEST(GlooMemory, ACallThatFindsNoneFailsAndTheNextOneEnds) {
  const Engine gloo = load_engine(path_testing::from_program(GLOO_PLUGIN));
  testing::MapKv kv;
  for (int n = 0; n < 1000; ++n) {
    const testing::KvSpace space(kv, base::cat(n));
    EngineRank end(gloo.table(), space.host(), 0, 1, {});
    const auto status = refuse_nth(end, n);
    if (!refused) {
      EXPECT_EQ(status, LOCKSTEP_OK) << end.error();
      EXPECT_GT(n, 2) << "the plug-in does not use this operator new";
      return;
    }
    lockstep_handle* const handle = end.post(EngineRank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0));
    end.table().wait(handle, Deadline::after(Milliseconds(20'000)).monotonic_ns());
    ASSERT_NE(end.table().test(handle), LOCKSTEP_PENDING) << "stuck after allocation " << n;
    end.table().release(handle);
  }
  ADD_FAILURE() << "it never ends";
}

}  // namespace
}  // namespace lockstep::comm
