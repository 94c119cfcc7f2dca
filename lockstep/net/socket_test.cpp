#include "lockstep/net/socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <future>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/error.h"

namespace lockstep::net {
namespace {

using call_testing::patience;
using call_testing::soon;

template <class Call>
Failure failure_of(Call call) {
  try {
    call();
  } catch (const DistNetworkError& error) {
    return error.failure();
  }
  ADD_FAILURE() << "raised no DistNetworkError";
  return {};
}

struct Connected {
  Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 16);
  Socket client = Socket::connect("127.0.0.1", listener.local().port(), patience());
  Socket server = listener.accept(patience());
};

TEST(Address, ParsesAndPrintsBothFamilies) {
  EXPECT_EQ(Address::parse("127.0.0.1", 80)->text(), "127.0.0.1:80");
  EXPECT_EQ(Address::parse("::1", 29500)->text(), "[::1]:29500");
  EXPECT_EQ(Address::parse("[::1]", 29500)->text(), "[::1]:29500");
  EXPECT_EQ(Address::parse("2001:db8::17", 1)->text(), "[2001:db8::17]:1");
  EXPECT_EQ(Address::parse("::1", 29500)->port(), 29500);
}

TEST(Address, ALocalNameIsPrintedWithoutWhatATerminalOrALogWouldTakeForItsOwn) {
  EXPECT_EQ(Address::local_name("a\nb\x1b[2J").text(), "@a?b?[2J");
}

TEST(Address, NamesAndNonsenseAreNoAddresses) {
  for (const char* text : {"localhost", "", "1.2.3.4.5", "300.1.1.1", "::g", "[::1", "a b"}) {
    EXPECT_FALSE(Address::parse(text, 1)) << text;
  }
}

TEST(Address, KnowsLoopback) {
  EXPECT_TRUE(Address::parse("127.8.9.1", 1)->is_loopback());
  EXPECT_TRUE(Address::parse("::1", 1)->is_loopback());
  EXPECT_TRUE(Address::parse("::ffff:127.0.0.1", 1)->is_loopback());
  EXPECT_FALSE(Address::parse("128.0.0.1", 1)->is_loopback());
  EXPECT_FALSE(Address::parse("::ffff:10.0.0.1", 1)->is_loopback());
  EXPECT_FALSE(Address::any(AF_INET6, 1).is_loopback());
  EXPECT_TRUE(names_loopback("LocalHost"));
  EXPECT_TRUE(names_loopback("[::1]"));
  EXPECT_FALSE(names_loopback("node-7"));
  EXPECT_FALSE(names_loopback("0.0.0.0"));
}

TEST(Address, AHostThatDoesNotExistIsNamedInTheError) {
  const std::string host(80, 'x');  // too long for a label: the resolver says no without asking anybody
  const Failure failure = failure_of([&] { Address::resolve(host, 1); });
  EXPECT_NE(failure.message.find(host), std::string::npos) << failure.message;
}

TEST(Socket, CarriesBytesBothWays) {
  Connected pair;
  pair.client.write_all(to_bytes("ping"), patience());
  Bytes buffer(4);
  pair.server.read_exact(buffer, patience());
  EXPECT_EQ(to_text(buffer), "ping");
  pair.server.write_all(to_bytes("pong"), patience());
  pair.client.read_exact(buffer, patience());
  EXPECT_EQ(to_text(buffer), "pong");
  EXPECT_EQ(pair.client.peer(), pair.listener.local());
  EXPECT_EQ(pair.client.local(), pair.server.peer());
}

TEST(Socket, CarriesMoreThanTheKernelBuffers) {
  Connected pair;
  Bytes sent(8 << 20);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::uint8_t>(i * 2654435761u >> 11);
  auto writer = std::async(std::launch::async, [&] { pair.client.write_all(sent, patience()); });
  Bytes got(sent.size());
  pair.server.read_exact(got, patience());
  writer.get();
  EXPECT_TRUE(got == sent);
}

TEST(Socket, AReadEndsAtItsDeadlineAndTheSocketStaysUsable) {
  Connected pair;
  Bytes buffer(1);
  EXPECT_EQ(failure_of([&] { pair.client.read_exact(buffer, soon()); }).kind, ErrorKind::kTimeout);
  EXPECT_EQ(failure_of([&] { pair.client.read_exact(buffer, Deadline::now()); }).kind, ErrorKind::kTimeout);
  pair.server.write_all(to_bytes("x"), patience());
  pair.client.read_exact(buffer, patience());
  EXPECT_EQ(buffer[0], 'x');
}

TEST(Socket, AWriteToAPeerThatDoesNotReadEndsAtItsDeadline) {
  Connected pair;
  const Bytes large(64 << 20);
  EXPECT_EQ(failure_of([&] { pair.client.write_all(large, soon()); }).kind, ErrorKind::kTimeout);
}

TEST(Socket, AClosedPeerIsPeerLost) {
  Connected pair;
  { const Socket gone = std::move(pair.server); }
  Bytes buffer(1);
  const Failure failure = failure_of([&] { pair.client.read_exact(buffer, patience()); });
  EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
  ASSERT_TRUE(failure.peer);
  EXPECT_FALSE(failure.peer->rank || failure.peer->pid) << "a socket knows neither";
  EXPECT_NE(failure.message.find(pair.listener.local().text()), std::string::npos) << failure.message;
}

TEST(Socket, ShutDownEndsABlockedRead) {
  Connected pair;
  auto reader = std::async(std::launch::async, [&] {
    Bytes buffer(1);
    pair.client.read_exact(buffer, patience());
  });
  pair.client.shut_down();
  EXPECT_THROW(reader.get(), DistNetworkError);
}

TEST(Socket, ARefusedConnectionNamesHostAndPort) {
  std::uint16_t port = 0;
  {
    const Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 1);
    port = listener.local().port();
  }
  const Failure failure = failure_of([&] { Socket::connect("127.0.0.1", port, patience()); });
  EXPECT_NE(failure.message.find(host_and_port("127.0.0.1", port)), std::string::npos) << failure.message;
}

TEST(Listener, ATakenPortIsReported) {
  const Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 1);
  const Failure failure = failure_of([&] { Listener::listen(listener.local(), 1); });
  EXPECT_NE(failure.message.find("EADDRINUSE"), std::string::npos) << failure.message;
}

TEST(Listener, AcceptEndsAtItsDeadline) {
  Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 1);
  EXPECT_EQ(failure_of([&] { listener.accept(soon()); }).kind, ErrorKind::kTimeout);
}

// One that lingers would hold up whoever closes it.
TEST(Listener, ALocalOneAndItsConnectionsTakeNoDescriptors) {
  constexpr int kPassRights = 83;
  const std::string name = "lockstep-test-" + base::random_hex(8);
  const Listener listener = Listener::listen(Address::local_name(name), 1);
  int value = 0;
  socklen_t length = sizeof value;
  if (::getsockopt(listener.fd(), SOL_SOCKET, kPassRights, &value, &length) != 0)
    GTEST_SKIP() << "needs SO_PASSRIGHTS (Linux 6.16)";
  const Socket client = Socket::connect_local(name, patience());
  std::uint8_t byte = 'x';
  iovec body{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<std::uint8_t, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  cmsghdr* part = CMSG_FIRSTHDR(&header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  const int descriptor = listener.fd();
  std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  EXPECT_EQ(::sendmsg(client.fd(), &header, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPERM);
  ASSERT_EQ(::getsockopt(client.fd(), SOL_SOCKET, kPassRights, &value, &length), 0);
  EXPECT_EQ(value, 0) << "whoever listens there could send some to the client";
}

TEST(Listener, AdoptsOnlyListeningSockets) {
  Connected pair;
  const int number = pair.client.fd();
  EXPECT_EQ(failure_of([&] { Listener::adopt(base::Fd(number)); }).kind, ErrorKind::kUsage);
  pair.client.write_all(to_bytes("still the caller's"), patience());
}

TEST(Address, OfThisMachineTowardAnother) {
  EXPECT_EQ(own_address_toward("127.0.0.1"), "127.0.0.1");
  EXPECT_THROW(own_address_toward("no such host"), DistNetworkError);
}

}  // namespace
}  // namespace lockstep::net
