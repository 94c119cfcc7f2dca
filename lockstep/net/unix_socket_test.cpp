#include "lockstep/net/unix_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <filesystem>
#include <future>
#include <thread>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fork_testing.h"

namespace lockstep::net {
namespace {

using call_testing::kind_of;
using call_testing::patience;
using call_testing::soon;

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

TEST(UnixSocket, MessagesKeepTheirBorders) {
  auto [a, b] = UnixSocket::pair();
  a.send(to_bytes("one"), patience());
  a.send(to_bytes("three"), patience());
  Bytes buffer(100);
  EXPECT_EQ(b.receive(buffer, patience()), 3u);
  EXPECT_EQ(b.receive(buffer, patience()), 5u);
  EXPECT_EQ(to_text(std::span(buffer).first(5)), "three");
}

TEST(UnixSocket, ReportsThePeersCredentials) {
  UnixListener listener = UnixListener::listen();
  UnixSocket client = UnixSocket::connect(listener.name(), patience());
  UnixSocket server = listener.accept(patience());
  for (const UnixSocket* end : {&client, &server}) {
    EXPECT_EQ(end->peer().pid, ::getpid());
    EXPECT_EQ(end->peer().uid, ::getuid());
  }
}

TEST(UnixSocket, CarriesDescriptorsThatCloseOnExec) {
  auto [a, b] = UnixSocket::pair();
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const base::Fd in(ends[0]), out(ends[1]);
  a.send(to_bytes("two"), patience(), std::array{in.get(), out.get()});
  Bytes buffer(16);
  std::vector<base::Fd> fds;
  b.receive(buffer, patience(), &fds);
  ASSERT_EQ(fds.size(), 2u);
  for (const base::Fd& fd : fds) EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::write(fds[1].get(), "x", 1), 1);
  char byte = 0;
  ASSERT_EQ(::read(in.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

// The kernel can refuse them (Linux 6.16).
bool descriptors_can_be_refused() {
  constexpr int kPassRights = 83;
  int value = 0;
  socklen_t length = sizeof value;
  return ::getsockopt(UnixListener::listen().fd(), SOL_SOCKET, kPassRights, &value, &length) == 0;
}

TEST(UnixSocket, NeitherEndOfAConnectionByNameTakesDescriptorsBeforeItTrustsTheOther) {
  if (!descriptors_can_be_refused()) GTEST_SKIP() << "needs SO_PASSRIGHTS (Linux 6.16)";
  UnixListener listener = UnixListener::listen();
  UnixSocket client = UnixSocket::connect(listener.name(), patience());
  const std::array<int, 1> descriptor{listener.fd()};
  // Not accepted yet: what is passed now would be closed by whoever accepts.
  EXPECT_EQ(kind_of([&] { client.send(to_bytes("x"), soon(), descriptor); }), ErrorKind::kTimeout);
  UnixSocket server = listener.accept(patience());
  EXPECT_EQ(kind_of([&] { client.send(to_bytes("x"), soon(), descriptor); }), ErrorKind::kTimeout);
  EXPECT_EQ(kind_of([&] { server.send(to_bytes("x"), soon(), descriptor); }), ErrorKind::kTimeout);
  Bytes buffer(16);
  EXPECT_EQ(kind_of([&] { server.receive(buffer, soon()); }), ErrorKind::kTimeout) << "half a message came";
  EXPECT_TRUE(server.trust_own_user());
  client.send(to_bytes("x"), patience(), descriptor);
  std::vector<base::Fd> fds;
  server.receive(buffer, patience(), &fds);
  EXPECT_EQ(fds.size(), 1u);
  EXPECT_EQ(kind_of([&] { server.send(to_bytes("x"), soon(), descriptor); }), ErrorKind::kTimeout)
      << "it is the client's turn to trust";
}

// The kernel counts per user what was sent and not yet received, and holds it against the limit of open
// files.
TEST(UnixSocket, DescriptorsBeyondTheUsersLimitAreSentOnceOthersArrived) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become a user with few";
  fork_testing::Children children;
  children.start([] {
    const rlimit few{.rlim_cur = 32, .rlim_max = 32};
    CHILD_EXPECT(::setrlimit(RLIMIT_NOFILE, &few) == 0, errno);
    CHILD_EXPECT(::setresgid(65533, 65533, 65533) == 0 && ::setresuid(65533, 65533, 65533) == 0, errno);
    auto ends = UnixSocket::pair();
    CHILD_EXPECT(ends.second.trust_own_user(), "itself");
    const std::vector<int> numbers(8, 0);
    constexpr int kMessages = 8;  // 64 descriptors
    std::thread receiver([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the sender comes to its limit
      for (int i = 0; i < kMessages; ++i) {
        Bytes buffer(100);
        std::vector<base::Fd> fds;
        ends.second.receive(buffer, patience(), &fds);
        CHILD_EXPECT(fds.size() == 8, fds.size());
      }
    });
    for (int i = 0; i < kMessages; ++i) ends.first.send(to_bytes("here"), patience(), numbers);
    receiver.join();
  });
  EXPECT_EQ(children.status(0), 0);
}

TEST(UnixSocket, UnrequestedDescriptorsAreClosed) {
  auto [a, b] = UnixSocket::pair();
  Bytes buffer(16);
  const std::size_t before = open_descriptors();
  a.send(to_bytes("x"), patience(), std::array{a.fd(), a.fd(), a.fd()});
  b.receive(buffer, patience());
  EXPECT_EQ(open_descriptors(), before);
  a.send(to_bytes("longer than sixteen bytes"), patience(), std::array{a.fd()});
  EXPECT_EQ(kind_of([&] { b.receive(buffer, patience()); }), ErrorKind::kSystem);
  EXPECT_EQ(open_descriptors(), before);
}

TEST(UnixSocket, EveryCallEndsAtItsDeadline) {
  auto [a, b] = UnixSocket::pair();
  Bytes buffer(16);
  EXPECT_EQ(kind_of([&] { b.receive(buffer, soon()); }), ErrorKind::kTimeout);
  UnixListener listener = UnixListener::listen();
  EXPECT_EQ(kind_of([&] { listener.accept(soon()); }), ErrorKind::kTimeout);
  EXPECT_EQ(kind_of([&] {
              const Bytes message(kMaxUnixMessage);
              for (int i = 0; i < 100'000; ++i) a.send(message, soon());
            }),
            ErrorKind::kTimeout);
  EXPECT_EQ(kind_of([&] { UnixSocket::connect("lockstep-nobody-" + base::random_hex(8), soon()); }),
            ErrorKind::kTimeout);
}

TEST(UnixSocket, AConnectorMayComeBeforeTheListener) {
  const std::string name = "lockstep-test-" + base::random_hex(8);
  auto client = std::async(std::launch::async, [&] { return UnixSocket::connect(name, patience()); });
  std::this_thread::sleep_for(Milliseconds(5));
  UnixListener listener = UnixListener::listen(name);
  EXPECT_TRUE(listener.accept(patience()));
  EXPECT_TRUE(client.get());
}

TEST(UnixSocket, APeerThatIsGoneIsPeerLost) {
  auto [a, b] = UnixSocket::pair();
  EXPECT_FALSE(a.peer_closed());
  { const UnixSocket gone = std::move(b); }
  EXPECT_TRUE(a.peer_closed());
  Bytes buffer(1);
  EXPECT_EQ(kind_of([&] { a.receive(buffer, patience()); }), ErrorKind::kPeerLost);
  EXPECT_EQ(kind_of([&] { a.send(buffer, patience()); }), ErrorKind::kPeerLost);
}

TEST(UnixSocket, EmptyAndOversizeMessagesAreUsageErrors) {
  auto [a, b] = UnixSocket::pair();
  EXPECT_EQ(kind_of([&] { a.send({}, patience()); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { a.send(Bytes(kMaxUnixMessage + 1), patience()); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { a.send(Bytes(1), patience(), std::vector<int>(kMaxUnixFds + 1, a.fd())); }),
            ErrorKind::kUsage);
}

TEST(UnixListener, ATakenNameIsAUsageErrorAndAFreedOneCanBeTaken) {
  std::string name;
  {
    const UnixListener first = UnixListener::listen();
    name = first.name();
    EXPECT_EQ(kind_of([&] { UnixListener::listen(name); }), ErrorKind::kUsage);
  }
  UnixListener::listen(name);
  EXPECT_EQ(kind_of([] { UnixListener::listen(std::string(200, 'x')); }), ErrorKind::kUsage);
}

}  // namespace
}  // namespace lockstep::net
