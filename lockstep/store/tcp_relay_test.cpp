// A process of this machine that does not know the secret, and wants to stand between a store and its
// clients.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/internal/tcp_client.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using call_testing::patience;

// Nothing when the machine does not have the address, or the port is taken there.
std::optional<net::Listener> try_listen(const char* ip, std::uint16_t port) {
  try {
    return net::Listener::listen(*net::Address::parse(ip, port), 4);
  } catch (const DistNetworkError&) {
    return std::nullopt;
  }
}

bool has_ipv6() {
  return try_listen("::1", 0).has_value();
}

// Passes one connection on to the store, and writes "evil!" over every "value" on its way back.
class Relay {
 public:
  Relay(net::Listener listener, std::uint16_t port)
      : listener_(std::move(listener)), thread_([this, port] { run(port); }) {}
  ~Relay() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run(std::uint16_t port) {
    try {
      net::Socket client = accept();
      net::Socket server = net::Socket::connect("127.0.0.1", port, patience());
      while (!stop_) pass(client, server);
    } catch (const Error&) {
      // One of the two is gone, or nobody came.
    }
  }
  net::Socket accept() {
    for (;;) {
      try {
        return listener_.accept(Deadline::after(Milliseconds(20)));
      } catch (const DistNetworkError& error) {
        if (error.kind() != ErrorKind::kTimeout || stop_) throw;
      }
    }
  }
  static void pass(net::Socket& client, net::Socket& server) {
    pollfd both[] = {{client.fd(), POLLIN, 0}, {server.fd(), POLLIN, 0}};
    if (::poll(both, 2, 20) <= 0) return;
    Bytes bytes(4096);
    if (both[0].revents != 0) {
      bytes.resize(client.read_some(bytes, patience()));
      server.write_all(bytes, patience());
    } else {
      bytes.resize(server.read_some(bytes, patience()));
      std::string text = to_text(bytes);
      if (const auto at = text.find("value"); at != std::string::npos) text.replace(at, 5, "evil!");
      client.write_all(to_bytes(text), patience());
    }
  }

  net::Listener listener_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST(TcpRelay, AMasterAtLocalhostTakesItsPortOnEveryLoopbackAddress) {
  const auto master = TcpStore::open("localhost", {.port = 0, .is_master = true});
  for (const char* ip : {"127.0.0.1", "::1"}) EXPECT_FALSE(try_listen(ip, master->port())) << ip;
  for (const char* ip : {"127.0.0.1", "::1"}) {
    if (std::string_view(ip) == "::1" && !has_ipv6()) continue;
    EXPECT_EQ(TcpStore::open(ip, {.port = master->port()})->add(ip, 1), 1) << ip;
  }
}

TEST(TcpRelay, AStrangerThatRelaysTheHandshakeIsNotTakenForTheStore) {
  if (!has_ipv6()) GTEST_SKIP() << "no second loopback address";
  const JobSecret secret = JobSecret::mint();
  const auto master = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .secret = secret});
  master->set("key", "value");
  master->num_keys();
  auto listener = try_listen("::1", master->port());
  ASSERT_TRUE(listener);
  const Relay relay(std::move(*listener), master->port());
  try {
    const auto client = TcpStore::open(
        "::1",
        {.port = master->port(), .timeout = Milliseconds(300), .secret = secret, .local_socket = false});
    ADD_FAILURE() << "the client reads \"" << to_text(client->get("key")) << "\" through the relay";
  } catch (const DistNetworkError&) {
    // The store does not speak to somebody who meant another address.
  }
}

// Takes connections at an address that is the store's as well for all a client knows, and does `crime` to
// them.
class Squatter {
 public:
  Squatter(std::uint16_t port, std::string crime)
      : crime_(std::move(crime)),
        listener_(net::Listener::listen(*net::Address::parse("127.0.0.2", port), 16)),
        thread_([this] { run(); }) {}
  ~Squatter() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run() {
    while (!stop_) {
      try {
        net::Socket client = listener_.accept(Deadline::after(Milliseconds(20)));
        if (crime_ == "lies") client.write_all(Bytes(sizeof(net::Challenge)), patience());
        if (crime_ != "closes") kept_.push_back(std::move(client));
      } catch (const DistNetworkError&) {
        // Nobody came, or it left.
      }
    }
  }

  const std::string crime_;
  net::Listener listener_;
  std::vector<net::Socket> kept_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST(TcpRelay, AStrangerAtOneAddressOfAHostDoesNotKeepClientsFromTheStoreAtAnother) {
  const JobSecret secret = JobSecret::mint();
  const auto master = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .secret = secret});
  const std::uint16_t port = master->port();
  const std::vector addresses = {*net::Address::parse("127.0.0.2", port),
                                 *net::Address::parse("127.0.0.1", port)};
  for (const std::string crime : {"closes", "lies", "says nothing"}) {
    const Squatter squatter(port, crime);
    const auto client = internal::TcpClient::connect_to_any(
        addresses, {.host = "both", .port = port, .secret = secret}, Deadline::after(Milliseconds(1'500)));
    EXPECT_TRUE(client.is_ours()) << crime;
  }
}

// Strangers may have taken the place of a client that is far away each time before its proof came.
TEST(TcpStrangers, AClientThatTheStoreItselfDropsComesBackUntilItsTimeIsUp) {
  const JobSecret secret = JobSecret::mint();
  auto listener = net::Listener::listen(*net::Address::parse("127.0.0.1", 0), 16);
  const std::uint16_t port = listener.local().port();
  constexpr int kDrops = 6;
  std::thread store([&] {
    for (int i = 0; i <= kDrops; ++i) {
      net::Socket client = listener.accept(patience());
      try {
        net::handshake_as_server(client, i < kDrops ? secret : JobSecret::mint(),
                                 {.purpose = net::Purpose::kStoreTcp, .address = client.local().canonical()},
                                 patience());
      } catch (const DistNetworkError&) {
        // It left after the wrong proof.
      }
    }
  });
  try {
    TcpStore::open("127.0.0.1", {.port = port, .timeout = Milliseconds(60'000), .secret = secret});
    ADD_FAILURE() << "there is no store";
  } catch (const DistNetworkError& error) {
    EXPECT_NE(std::string(error.what()).find("it has another job secret"), std::string::npos) << error.what();
  }
  net::Socket::connect("127.0.0.1", port, patience());  // for one that has waited for another call
  store.join();
}

// What a process with room for 64 descriptors answers when a hundred strangers call its store and say
// nothing.
int serve_with_few_descriptors(int ports, int go) {
  const rlimit few{.rlim_cur = 64, .rlim_max = 64};
  ::setrlimit(RLIMIT_NOFILE, &few);
  const JobSecret secret = JobSecret::mint();
  try {
    const auto master = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .secret = secret});
    const std::uint16_t port = master->port();
    char byte = 0;
    if (::write(ports, &port, sizeof port) != sizeof port || ::read(go, &byte, 1) != 1) return 2;
    const auto own =
        TcpStore::open("127.0.0.1", {.port = port, .timeout = Milliseconds(10'000), .secret = secret});
    return own->add("n", 1) == 1 ? 0 : 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

TEST(TcpStrangers, AHundredWhoSayNothingDoNotExhaustTheMastersDescriptors) {
  int ports[2];
  int go[2];
  ASSERT_EQ(::pipe(ports), 0);
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(serve_with_few_descriptors(ports[1], go[0]));
  std::uint16_t port = 0;
  ASSERT_EQ(::read(ports[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  std::vector<net::Socket> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(net::Socket::connect("127.0.0.1", port, patience()));
  ASSERT_EQ(::write(go[1], "g", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const int fd : {ports[0], ports[1], go[0], go[1]}) ::close(fd);
}

}  // namespace
}  // namespace lockstep
