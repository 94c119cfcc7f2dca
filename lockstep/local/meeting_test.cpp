// Ranks that meet, as threads and as processes, and what may go wrong: strangers with another key, of another
// user, that say nothing; ranks of another version, that leave, die, are stopped or never come.
#include "lockstep/local/meeting.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/fork_testing.h"
#include "lockstep/local/internal/meeting_messages.h"
#include "lockstep/net/peer_handshake.h"

namespace lockstep::local {
namespace {

using fork_testing::Children;
using fork_testing::Shared;
using internal::MeetingAddress;

constexpr std::size_t kSegment = 1 << 20;

// What several processes see: few short values, in shared memory, looked at again and again.
class SharedStore final : public KeyValue {
 public:
  void set(const std::string& key, std::span<const std::uint8_t> value) override {
    Entry& entry = entry_of(key);
    entry.length = std::min(value.size(), sizeof(entry.bytes));
    std::copy_n(value.begin(), entry.length, entry.bytes);
    entry.there.store(true, std::memory_order_release);
  }
  std::optional<Bytes> get(const std::string& key, Deadline deadline) override {
    const Entry& entry = entry_of(key);
    while (!entry.there.load(std::memory_order_acquire)) {
      if (deadline.expired()) return std::nullopt;
      ::usleep(500);
    }
    return Bytes(entry.bytes, entry.bytes + entry.length);
  }

 private:
  struct Entry {
    std::atomic<bool> there{false};
    std::size_t length = 0;
    std::uint8_t bytes[1024] = {};
  };
  struct Entries {
    Entry address, elsewhere, gave_up;
  };
  Entry& entry_of(const std::string& key) {
    return key == "host/0"           ? entries_->address
           : key == "host/elsewhere" ? entries_->elsewhere
                                     : entries_->gave_up;
  }
  const Shared<Entries> entries_;
};

MeetingOptions options_of(int rank, int size, Milliseconds patience = fork_testing::kPatience) {
  return {.rank = rank,
          .size = size,
          .group = "test",
          .version = 1,
          .own = SegmentTable::of_process().create("meeting", kSegment),
          .attendance_at = 64,
          .deadline = Deadline::after(patience)};
}

std::string failure_of_meeting(KeyValue& store, const MeetingOptions& options) {
  try {
    meet(store, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Writes its rank into its own segment, meets, and reads everybody's.
std::string meet_and_look(KeyValue& store, const MeetingOptions& options) {
  options.own->data()[0] = static_cast<std::uint8_t>(options.rank + 1);
  const auto peers = meet(store, options);
  if (static_cast<int>(peers.size()) != options.size) return "wrong number";
  for (std::size_t r = 0; r < peers.size(); ++r) {
    if (peers[r].segment->data()[0] != r + 1) return base::cat("wrong memory of rank ", r);
    if (peers[r].same_process == static_cast<bool>(peers[r].process)) return "a life of one's own";
  }
  return "";
}

// What rank 0 has published, by then.
MeetingAddress address_in(KeyValue& store) {
  return MeetingAddress::decode(*store.get("host/0", Deadline::after(fork_testing::kPatience))).value();
}

net::UnixSocket connect_to(const MeetingAddress& address) {
  auto socket = net::UnixSocket::connect(address.socket, Deadline::after(fork_testing::kPatience));
  socket.trust_own_user();
  return socket;
}

TEST(Meeting, ThreadsAndProcessesAllHaveTheMemoryOfAll) {
  for (const int size : {1, 2, 3, 7}) {
    SharedStore store;
    Children children;
    // The upper half are threads of one other process.
    const int first_thread = (size + 1) / 2;
    for (int r = 1; r < first_thread; ++r)
      children.start([&] { CHILD_EXPECT(meet_and_look(store, options_of(r, size)) == "", r); });
    children.start([&] {
      std::vector<MeetingOptions> ranks;
      for (int r = first_thread; r < size; ++r) ranks.push_back(options_of(r, size));
      std::vector<std::thread> threads;
      for (const auto& rank : ranks)
        threads.emplace_back([&] { CHILD_EXPECT(meet_and_look(store, rank) == "", rank.rank); });
      for (auto& thread : threads) thread.join();
    });
    EXPECT_EQ(meet_and_look(store, options_of(0, size)), "");
    for (int i = 0; i < children.size(); ++i) EXPECT_EQ(children.status(i), 0) << size;
  }
}

TEST(Meeting, RanksOfOneProcessUseOneMapping) {
  SharedStore store;
  const auto first = options_of(0, 2), second = options_of(1, 2);
  std::vector<LocalPeer> seen_by_second;
  std::thread thread([&] { seen_by_second = meet(store, second); });
  const auto seen_by_first = meet(store, first);
  thread.join();
  EXPECT_EQ(seen_by_first[1].segment, second.own);
  EXPECT_EQ(seen_by_second[0].segment, first.own);
}

TEST(Meeting, AStrangerWithAnotherKeyIsDroppedAndTheRanksMeet) {
  SharedStore store;
  const auto rank_0 = options_of(0, 2), rank_1 = options_of(1, 2);
  std::thread second([&] {
    MeetingAddress forged = address_in(store);
    forged.key = base::random_hex(32);
    auto socket = connect_to(forged);
    net::HandshakeInitiator stranger(forged.secret(), forged.binding(), {});
    socket.send(stranger.first(), Deadline::after(fork_testing::kPatience));
    std::uint8_t buffer[1024];
    const std::size_t n = socket.receive(buffer, Deadline::after(fork_testing::kPatience));
    EXPECT_FALSE(stranger.next({buffer, n}).refusal.empty()) << "rank 0 could not prove itself to a stranger";
    EXPECT_EQ(meet_and_look(store, rank_1), "");
  });
  EXPECT_EQ(meet_and_look(store, rank_0), "");
  second.join();
}

TEST(Meeting, AnImpostorOfRankZeroWithoutItsKeyGetsNothing) {
  SharedStore store;
  auto listener = net::UnixListener::listen();
  MeetingAddress address = MeetingAddress::of(listener.name());
  store.set("host/0", address.encode());
  std::thread impostor([&] {
    auto socket = listener.accept(Deadline::after(fork_testing::kPatience));
    socket.trust_own_user();
    address.key = base::random_hex(32);
    net::HandshakeResponder responder(address.secret(), address.binding());
    std::uint8_t buffer[1024];
    std::vector<base::Fd> fds;
    const std::size_t n = socket.receive(buffer, Deadline::after(fork_testing::kPatience), &fds);
    EXPECT_TRUE(fds.empty());
    socket.send(responder.next({buffer, n}).send, Deadline::after(fork_testing::kPatience));
    EXPECT_THROW(socket.receive(buffer, Deadline::after(fork_testing::kPatience), &fds), Error);
    EXPECT_TRUE(fds.empty()) << "a stranger got the memory";
  });
  EXPECT_EQ(failure_of_meeting(store, options_of(1, 2)),
            "the process that answered for rank 0 does not belong to this job");
  impostor.join();
}

TEST(Meeting, MemoryIsNotSentToAProcessOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  SharedStore store;
  const std::string name = "lockstep-test-" + base::random_hex(8);
  Children children;
  children.start([&] {
    CHILD_EXPECT(::setresuid(65534, 65534, 65534) == 0, errno);
    auto listener = net::UnixListener::listen(name);
    auto socket = listener.accept(Deadline::after(fork_testing::kPatience));
    std::uint8_t message[1024];
    std::vector<base::Fd> fds;
    try {
      socket.receive(message, Deadline::after(fork_testing::kPatience), &fds);
      CHILD_EXPECT(false, "a stranger was spoken to");
    } catch (const Error& error) {
      CHILD_EXPECT(error.kind() == ErrorKind::kPeerLost, error.what());
    }
    CHILD_EXPECT(fds.empty(), "a stranger got the memory");
  });
  store.set("host/0", MeetingAddress::of(name).encode());
  EXPECT_EQ(failure_of_meeting(store, options_of(1, 2)),
            "the process that answered for rank 0 does not belong to this job");
  EXPECT_EQ(children.status(0), 0);
}

TEST(Meeting, ACallerOfAnotherUserIsDroppedAndTheRanksMeet) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  SharedStore store;
  const Shared<std::atomic<bool>> dropped;
  Children children;
  children.start([&] {
    const MeetingAddress address = address_in(store);
    CHILD_EXPECT(::setresuid(65534, 65534, 65534) == 0, errno);
    auto socket = net::UnixSocket::connect(address.socket, Deadline::after(fork_testing::kPatience));
    std::uint8_t message[1024];
    try {
      socket.receive(message, Deadline::after(fork_testing::kPatience));
      CHILD_EXPECT(false, "rank 0 spoke to a stranger");
    } catch (const Error& error) {
      CHILD_EXPECT(error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kSystem, error.what());
    }
    *dropped = true;
  });
  children.start([&] {
    CHILD_EXPECT(fork_testing::eventually([&] { return dropped->load(); }), "the stranger is still there");
    CHILD_EXPECT(meet_and_look(store, options_of(1, 2)) == "", "");
  });
  EXPECT_EQ(meet_and_look(store, options_of(0, 2)), "");
  EXPECT_EQ(children.status(0), 0);
  EXPECT_EQ(children.status(1), 0);
}

// Each of them is dropped at once; however quickly they come back, the ranks get their turn.
TEST(Meeting, AFloodOfCallersOfAnotherUserDelaysNoRank) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  SharedStore store;
  const Shared<std::atomic<bool>> done;
  const Shared<std::atomic<int>> n_calls;
  Children children;
  constexpr int kFlooders = 3;
  for (int i = 0; i < kFlooders; ++i) {
    children.start([&] {
      const MeetingAddress address = address_in(store);
      CHILD_EXPECT(::setresuid(65534, 65534, 65534) == 0, errno);
      const Deadline end = Deadline::after(Milliseconds(10'000));
      for (int code = 0; !done->load() && !end.expired(); ++*n_calls)
        net::UnixSocket::try_connect(address.socket, code);
      CHILD_EXPECT(done->load(), "the ranks did not meet while strangers called");
    });
  }
  children.start([&] {
    CHILD_EXPECT(fork_testing::eventually([&] { return *n_calls > 1000; }), "nobody calls");
    CHILD_EXPECT(meet_and_look(store, options_of(1, 2)) == "", "");
    *done = true;
  });
  EXPECT_EQ(meet_and_look(store, options_of(0, 2)), "");
  for (int i = 0; i <= kFlooders; ++i) EXPECT_EQ(children.status(i), 0);
}

// As when it was stopped for longer than rank 0 waits for silent callers.
TEST(Meeting, ARankThatWasDroppedBeforeItsWelcomeCallsAgain) {
  SharedStore store;
  auto listener = net::UnixListener::listen();
  MeetingAddress address = MeetingAddress::of(listener.name());
  address.process = "another";
  store.set("host/0", address.encode());
  std::thread first([&] {
    for (int i = 0; i < 3; ++i) listener.accept(Deadline::after(fork_testing::kPatience));
    auto socket = listener.accept(Deadline::after(fork_testing::kPatience));
    std::uint8_t buffer[1024];
    const std::size_t n = socket.receive(buffer, Deadline::after(fork_testing::kPatience));
    net::HandshakeResponder responder(address.secret(), address.binding());
    EXPECT_TRUE(responder.next({buffer, n}).refusal.empty()) << "it begins anew";
    listener = net::UnixListener::listen();  // and now nobody listens there
  });
  EXPECT_EQ(failure_of_meeting(store, options_of(1, 2)), "rank 0 ended while the group was forming");
  first.join();
}

// Whoever took rank 0's name has no say before it has proven that it is rank 0.
TEST(Meeting, ARefusalWithoutAProofIsIgnored) {
  SharedStore store;
  auto listener = net::UnixListener::listen();
  store.set("host/0", MeetingAddress::of(listener.name()).encode());
  std::thread impostor([&] {
    auto socket = listener.accept(Deadline::after(fork_testing::kPatience));
    internal::send_refusal(socket, {.kind = ErrorKind::kPeerLost, .message = "rank 7 was killed"});
    std::uint8_t buffer[1024];
    EXPECT_NO_THROW(socket.receive(buffer, Deadline::after(fork_testing::kPatience)));
    EXPECT_THROW(socket.receive(buffer, Deadline::after(fork_testing::kPatience)), Error);
  });
  EXPECT_EQ(failure_of_meeting(store, options_of(1, 2)),
            "the process that answered for rank 0 does not belong to this job");
  impostor.join();
}

TEST(Meeting, SilentStrangersDelayNoRank) {
  SharedStore store;
  const auto rank_0 = options_of(0, 2), rank_1 = options_of(1, 2);
  std::thread second([&] {
    const MeetingAddress address = address_in(store);
    std::vector<net::UnixSocket> silent;
    for (int i = 0; i < 5; ++i) silent.push_back(connect_to(address));
    EXPECT_EQ(meet_and_look(store, rank_1), "");
  });
  EXPECT_EQ(meet_and_look(store, rank_0), "");
  second.join();
}

TEST(Meeting, ARankOfAnotherVersionOrForAnotherSizeIsNamedByAll) {
  const auto expect_named = [](const MeetingOptions& odd, const char* words) {
    SharedStore store;
    std::string by_odd, by_other;
    std::thread odd_one([&] { by_odd = failure_of_meeting(store, odd); });
    std::thread other([&] { by_other = failure_of_meeting(store, options_of(2, 3)); });
    EXPECT_EQ(failure_of_meeting(store, options_of(0, 3)), words);
    odd_one.join();
    other.join();
    EXPECT_EQ(by_odd, words);
    EXPECT_NE(by_other.find(words), std::string::npos) << by_other;
  };
  auto odd = options_of(1, 3);
  odd.version = 2;
  expect_named(odd, "rank 1 runs another version of lockstep than rank 0");
  expect_named(options_of(1, 4), "rank 1 joins a group of 4 ranks, but rank 0 one of 3");
}

TEST(Meeting, ARankThatDiesAfterItWasWelcomedEndsTheWaitOfAll) {
  SharedStore store;
  Children children;
  children.start([&] { meet(store, options_of(2, 3)); });
  const auto first = options_of(0, 3);
  const auto& attendance = *reinterpret_cast<const Attendance*>(first.own->data() + first.attendance_at);
  std::thread watcher([&] {
    EXPECT_TRUE(fork_testing::eventually([&] { return attendance.arrived[2] == 1; }));
    children.kill(0);
  });
  EXPECT_EQ(failure_of_meeting(store, first), "rank 2 left or ended while the group was forming");
  watcher.join();
}

// Stopped before it came, as by a debugger: nobody can know more than that it is missing.
TEST(Meeting, OneThatIsStoppedIsNamedByAllWhenTimeIsUp) {
  SharedStore store;
  Children children;
  children.start([&] {
    ::raise(SIGSTOP);
    meet(store, options_of(2, 3));
  });
  std::string by_second;
  std::thread second([&] { by_second = failure_of_meeting(store, options_of(1, 3)); });
  const std::string by_first = failure_of_meeting(store, options_of(0, 3, Milliseconds(300)));
  second.join();
  // On a busy machine the second may have been late too.
  EXPECT_NE(by_first.find("2 did not join the group in time"), std::string::npos) << by_first;
  EXPECT_NE(by_second.find("2 did not join the group in time"), std::string::npos) << by_second;
}

TEST(Meeting, ARankZeroThatNeverComesOrHasGivenUpIsSaid) {
  {
    SharedStore store;
    EXPECT_EQ(failure_of_meeting(store, options_of(1, 2, Milliseconds(50))),
              "rank 0 did not join the group in time: rank 1 waited for its address in the store");
  }
  SharedStore store;
  EXPECT_EQ(failure_of_meeting(store, options_of(0, 2, Milliseconds(50))),
            "rank 1 did not join the group in time");
  EXPECT_EQ(failure_of_meeting(store, options_of(1, 2)),
            "rank 0 gave up: rank 1 did not join the group in time");
}

TEST(Meeting, ARankOnAnotherHostIsNamedByBoth) {
  SharedStore store;
  MeetingAddress elsewhere = MeetingAddress::of("nowhere");
  elsewhere.host = "another host";
  store.set("host/0", elsewhere.encode());
  const std::string words = failure_of_meeting(store, options_of(1, 2));
  EXPECT_NE(words.find("rank 0 runs on another host"), std::string::npos) << words;
  const std::string by_first = failure_of_meeting(store, options_of(0, 2));
  EXPECT_NE(by_first.find("rank 1 runs on another host"), std::string::npos) << by_first;
}

}  // namespace
}  // namespace lockstep::local
