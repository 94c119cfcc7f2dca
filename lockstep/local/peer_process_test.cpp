#include "lockstep/local/peer_process.h"

#include <gtest/gtest.h>

#include "lockstep/local/peer_testing.h"

namespace lockstep::local {
namespace {

using fork_testing::Children;
using fork_testing::eventually;
using testing::ChildPeer;

TEST(PeerProcess, OneThatRunsIsNeitherEndedNorLostAndHasNoCause) {
  ChildPeer peer;
  EXPECT_TRUE(peer.process());
  EXPECT_FALSE(peer.process().ended());
  EXPECT_FALSE(peer.process().lost());
  EXPECT_FALSE(peer.process().cause(Deadline::now()));
}

TEST(PeerProcess, OneThatIsStoppedIsNotLost) {
  ChildPeer peer;
  peer.signal(SIGSTOP);
  EXPECT_FALSE(peer.process().cause(Deadline::after(Milliseconds(20))));
  EXPECT_FALSE(peer.process().lost());
  peer.signal(SIGCONT);
  peer.order(ChildPeer::kEnd);
  EXPECT_EQ(peer.status(), 0);
}

TEST(PeerProcess, OneThatWasKilledHasEndedAndSaysHow) {
  ChildPeer peer;
  peer.signal(SIGKILL);
  // Before the parent has reaped it the kernel may not know the cause yet.
  const auto cause = peer.process().cause(Deadline::after(fork_testing::kPatience));
  ASSERT_TRUE(cause);
  EXPECT_TRUE(*cause == "its process ended" || cause->find("SIGKILL") != std::string::npos) << *cause;
  EXPECT_EQ(base::describe_wait_status(peer.status()), "killed by SIGKILL (9)");
  EXPECT_TRUE(peer.process().ended());
  EXPECT_TRUE(peer.process().lost());
}

TEST(PeerProcess, OneThatBecameAnotherProgramIsLostThoughItRuns) {
  ChildPeer peer;
  peer.order(ChildPeer::kExec);
  EXPECT_TRUE(eventually([&] { return peer.process().lost(); }));
  EXPECT_FALSE(peer.process().ended());
}

TEST(PeerProcess, AForkedChildOfItsOwnDoesNotKeepItAlive) {
  ChildPeer peer;
  peer.order(ChildPeer::kFork);
  peer.await_fork();
  peer.order(ChildPeer::kEnd);
  peer.status();
  EXPECT_TRUE(peer.process().ended());
}

TEST(PeerProcess, ItsPidIsTheKernelsWord) {
  const auto [here, there] = net::UnixSocket::pair();
  Children children;
  children.start([&] {
    CHILD_EXPECT(there.peer().pid == ::getppid(), "made before the fork");
    const PeerProcess parent = PeerProcess::behind(there);
    CHILD_EXPECT(parent && parent.pid() == ::getppid(), parent.pid().value_or(-1));
  });
  EXPECT_EQ(children.status(0), 0);
  EXPECT_FALSE(PeerProcess::behind(here)) << "this process itself";
  EXPECT_FALSE(PeerProcess().pid());
  EXPECT_FALSE(PeerProcess().lost());
}

TEST(OwnProcess, AForkedChildHasDescriptorsAndATokenOfItsOwn) {
  const auto mine = OwnProcess::descriptors();
  const std::string token = OwnProcess::token();
  EXPECT_EQ(OwnProcess::descriptors().lifeline, mine.lifeline) << "one for all ranks of the process";
  EXPECT_LT(token.size(), 64u);
  Children children;
  children.start([&] {
    CHILD_EXPECT(OwnProcess::token() != token, token);
    OwnProcess::descriptors();
    // The numbers may be the same: the parent's were closed. What they are of is not.
    const auto own = OwnProcess::descriptors();
    const PeerProcess self(base::Fd(::dup(own.pidfd)), base::Fd(::dup(own.lifeline)));
    CHILD_EXPECT(own.pidfd < 0 || self.pid() == ::getpid(), self.pid().value_or(-1));
  });
  EXPECT_EQ(children.status(0), 0);
}

}  // namespace
}  // namespace lockstep::local
