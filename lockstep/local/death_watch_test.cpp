#include "lockstep/local/death_watch.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "lockstep/local/peer_testing.h"

namespace lockstep::local {
namespace {

using fork_testing::eventually;
using testing::ChildPeer;
using Loss = DeathWatch::Loss;

// What was reported, in the test's memory.
class Reports {
 public:
  DeathWatch::OnLost note() {
    return [this](int rank, Loss loss) {
      const std::lock_guard lock(mutex_);
      losses_.emplace(rank, loss);
    };
  }
  std::multimap<int, Loss> get() {
    const std::lock_guard lock(mutex_);
    return losses_;
  }

 private:
  std::mutex mutex_;
  std::multimap<int, Loss> losses_;  // guarded by mutex_
};

TEST(DeathWatch, EachLossIsReportedOnceAndTheStoppedAndTheLivingNever) {
  ChildPeer killed, forked, execed, stopped, lives;
  stopped.signal(SIGSTOP);
  forked.order(ChildPeer::kFork);
  forked.await_fork();
  Reports reports;
  {
    const DeathWatch watch({{1, &killed.process()},
                            {2, &forked.process()},
                            {3, &execed.process()},
                            {4, &stopped.process()},
                            {5, &lives.process()}},
                           reports.note());
    killed.signal(SIGKILL);
    forked.signal(SIGKILL);
    execed.order(ChildPeer::kExec);
    EXPECT_TRUE(eventually([&] { return reports.get().size() >= 3; }));
  }
  EXPECT_EQ(reports.get(),
            (std::multimap<int, Loss>{{1, Loss::kEnded}, {2, Loss::kEnded}, {3, Loss::kExec}}));
  stopped.signal(SIGCONT);
}

TEST(DeathWatch, OneThatWasGoneBeforeItBeganIsReportedToo) {
  ChildPeer peer;
  peer.order(ChildPeer::kEnd);
  peer.status();
  Reports reports;
  const DeathWatch watch({{7, &peer.process()}}, reports.note());
  EXPECT_TRUE(eventually([&] { return reports.get().size() == 1; }));
  EXPECT_EQ(reports.get(), (std::multimap<int, Loss>{{7, Loss::kEnded}}));
}

TEST(DeathWatch, WithoutAPidfdTheLifelineReportsTheEnd) {
  ChildPeer peer;
  const PeerProcess lifeline_only(base::Fd(), base::Fd(::dup(peer.process().lifeline())));
  Reports reports;
  const DeathWatch watch({{0, &lifeline_only}}, reports.note());
  peer.signal(SIGKILL);
  EXPECT_TRUE(eventually([&] { return reports.get().size() == 1; }));
  EXPECT_EQ(reports.get(), (std::multimap<int, Loss>{{0, Loss::kEnded}}));
}

TEST(DeathWatch, WithNoProcessToWatchItEndsImmediately) {
  const PeerProcess self;
  Reports reports;
  { const DeathWatch watch({{0, &self}}, reports.note()); }
  EXPECT_TRUE(reports.get().empty());
}

}  // namespace
}  // namespace lockstep::local
