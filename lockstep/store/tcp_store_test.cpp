// TcpStore: the contract suite, with and without a secret, and what only a store over TCP has.
#include "lockstep/store/tcp_store.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <unistd.h>

#include <mutex>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/store_contract.h"
#include "lockstep/store/tcp_store_testing.h"

namespace lockstep {
namespace {

using namespace tcp_testing;

// ---- the contract ----

class TcpWorld : public StoreWorld {
 public:
  explicit TcpWorld(TcpStoreOptions options)
      : server_(TcpStore::open(kHost, master(options))), options_(options) {
    options_.port = server_->port();
    options_.world_size.reset();
  }
  std::shared_ptr<Store> open() override { return TcpStore::open(kHost, options_); }

 private:
  std::unique_ptr<TcpStore> server_;
  TcpStoreOptions options_;
};

StoreKind kind(std::string name, std::function<TcpStoreOptions()> options, std::int64_t bookkeeping_keys) {
  return {std::move(name), [options] { return std::make_unique<TcpWorld>(options()); }, bookkeeping_keys,
          true};
}

INSTANTIATE_TEST_SUITE_P(
    Tcp, StoreContract,
    testing::Values(kind(
                        "TcpStore_open", [] { return TcpStoreOptions{}; }, 0),
                    kind(
                        "TcpStore_tcp", [] { return TcpStoreOptions{.local_socket = false}; }, 0),
                    kind(
                        "TcpStore_secret", [] { return TcpStoreOptions{.secret = JobSecret::mint()}; }, 0),
                    kind(
                        "TcpStore_sealed",
                        [] { return TcpStoreOptions{.secret = JobSecret::mint(), .local_socket = false}; },
                        0),
                    kind(
                        "TcpStore_world", [] { return TcpStoreOptions{.world_size = 1}; }, 1)),
    [](const auto& test) { return test.param.name; });

// ---- opening ----

TEST(TcpStore, HasTorchsDefaults) {
  const TcpStoreOptions options;
  EXPECT_EQ(options.port, 29500);
  EXPECT_FALSE(options.world_size);
  EXPECT_FALSE(options.is_master);
  EXPECT_EQ(options.timeout, Milliseconds(300'000));
  EXPECT_TRUE(options.wait_for_workers);
  EXPECT_FALSE(options.multi_tenant);
  EXPECT_FALSE(options.master_listen_fd);
}

TEST(TcpStore, PortZeroPicksAFreePortThatCanBeRead) {
  const auto a = TcpStore::open(kHost, master());
  const auto b = TcpStore::open(kHost, master());
  EXPECT_NE(a->port(), 0);
  EXPECT_NE(a->port(), b->port());
  EXPECT_TRUE(a->is_master());
  EXPECT_EQ(a->host(), kHost);
}

TEST(TcpStore, DescribesItselfWithAddresses) {
  const auto server = TcpStore::open(kHost, master());
  const auto client = TcpStore::open(kHost, {.port = server->port()});
  const std::string address = base::cat("127.0.0.1:", server->port());
  EXPECT_NE(server->describe().find("server " + address), std::string::npos) << server->describe();
  EXPECT_NE(client->describe().find("-> " + address), std::string::npos) << client->describe();
  EXPECT_EQ(client->describe().find("server"), std::string::npos) << client->describe();
}

TEST(TcpStore, OnTheServersHostALocalSocketIsUsedUnlessDisabled) {
  const auto server = TcpStore::open(kHost, master({.secret = JobSecret::mint()}));
  EXPECT_NE(server->describe().find("local socket"), std::string::npos) << server->describe();
  const auto plain = TcpStore::open(kHost, master({.local_socket = false}));
  EXPECT_EQ(plain->describe().find("local socket"), std::string::npos) << plain->describe();
}

TEST(TcpStore, DescribesItselfWhileAnotherThreadWaits) {
  const auto server = TcpStore::open(kHost, master());
  const auto client = TcpStore::open(kHost, {.port = server->port()});
  auto waiting = std::async(std::launch::async, [&] { client->get("late"); });
  while (client->describe().find("in a call") == std::string::npos) std::this_thread::yield();
  server->set("late", "here");
  waiting.get();
}

TEST(TcpStore, ACloneHasAConnectionOfItsOwnAndIsNeverTheServer) {
  auto server = TcpStore::open(kHost, master());
  const auto clone = server->clone();
  EXPECT_FALSE(dynamic_cast<TcpStore&>(*clone).is_master());
  EXPECT_NE(clone->describe(), server->describe());
  server.reset();
  EXPECT_THROW(clone->num_keys(), DistNetworkError) << "the server went with its master";
}

TEST(TcpStore, LocalhostAndIpv6WorkToo) {
  for (const std::string host : {"localhost", "::1", "[::1]"}) {
    try {
      net::Listener::listen(net::Address::resolve(host, 0).front(), 1);
    } catch (const DistNetworkError&) {
      continue;  // a machine without IPv6
    }
    const auto server = TcpStore::open(host, master());
    const auto client = TcpStore::open(host, {.port = server->port()});
    EXPECT_EQ(client->add("n", 1), 1) << host;
  }
}

TEST(TcpStore, ASecondMasterOnThePortFails) {
  const auto server = TcpStore::open(kHost, master());
  const Failure failure = failure_of<DistNetworkError>(
      [&] { TcpStore::open(kHost, {.port = server->port(), .is_master = true}); });
  EXPECT_TRUE(mentions(failure, "EADDRINUSE")) << failure.message;
  EXPECT_TRUE(mentions(failure, base::cat(server->port()))) << failure.message;
}

TEST(TcpStore, AMissingServerIsAnErrorThatNamesHostPortAndMilliseconds) {
  std::uint16_t port = 0;
  { port = net::Listener::listen(*net::Address::parse(kHost, 0), 1).local().port(); }
  const Failure failure =
      failure_of<DistNetworkError>([&] { TcpStore::open(kHost, {.port = port, .timeout = kShort}); });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
  EXPECT_TRUE(mentions(failure, base::cat(kHost, ":", port))) << failure.message;
  EXPECT_TRUE(mentions(failure, base::cat(kShort.count(), " ms"))) << failure.message;
}

TEST(TcpStore, AListenerThatNeverAnswersIsATimeout) {
  const auto mute = net::Listener::listen(*net::Address::parse(kHost, 0), 4);
  for (const auto& secret : {std::optional<JobSecret>(), std::optional(JobSecret::mint())}) {
    const Failure failure = failure_of<DistNetworkError>(
        [&] { TcpStore::open(kHost, {.port = mute.local().port(), .timeout = kShort, .secret = secret}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
  }
}

TEST(TcpStore, AClientMayComeBeforeItsServer) {
  std::uint16_t port = 0;
  { port = net::Listener::listen(*net::Address::parse(kHost, 0), 1).local().port(); }
  auto client = std::async(std::launch::async, [&] { return TcpStore::open(kHost, {.port = port}); });
  std::this_thread::sleep_for(Milliseconds(20));
  const auto server = TcpStore::open(kHost, {.port = port, .is_master = true});
  EXPECT_EQ(client.get()->add("n", 1), 1);
}

TEST(TcpStore, OptionsThatContradictEachOtherAreUsageErrors) {
  const auto kind_of = [](const TcpStoreOptions& options) {
    return failure_of<DistStoreError>([&] { TcpStore::open(kHost, options); }).kind;
  };
  EXPECT_EQ(kind_of({.port = 0}), ErrorKind::kUsage);
  EXPECT_EQ(kind_of(master({.world_size = 0})), ErrorKind::kUsage);
  EXPECT_EQ(kind_of({.master_listen_fd = 0}), ErrorKind::kUsage);
  EXPECT_EQ(kind_of(master({.timeout = Milliseconds(0)})), ErrorKind::kUsage);
  EXPECT_EQ(kind_of(master({.timeout = Milliseconds(-1)})), ErrorKind::kUsage);
  EXPECT_EQ(kind_of(master({.limits = {.validate_timeout = Milliseconds(0)}})), ErrorKind::kUsage);
}

TEST(TcpStore, WithoutATimeoutItOpensServesAndClones) {
  const auto server =
      TcpStore::open(kHost, master({.timeout = kNoTimeout, .limits = {.validate_timeout = kNoTimeout}}));
  const auto client = TcpStore::open(kHost, {.port = server->port(), .timeout = kNoTimeout});
  EXPECT_EQ(client->clone()->timeout(), kNoTimeout);
  client->clone()->set("key", "value");
  EXPECT_EQ(to_text(client->get("key")), "value");
}

// ---- workers ----

TEST(TcpStore, TheMasterWaitsForItsWorkersAndWorkersDoNot) {
  const auto listener = net::Listener::listen(*net::Address::parse(kHost, 0), 4);
  const std::uint16_t port = listener.local().port();
  const int fd = ::fcntl(listener.fd(), F_DUPFD_CLOEXEC, 0);
  auto server = std::async(std::launch::async, [&] {
    return TcpStore::open(kHost, {.port = port, .world_size = 3, .is_master = true, .master_listen_fd = fd});
  });
  const auto first = TcpStore::open(kHost, {.port = port, .world_size = 3});
  EXPECT_EQ(server.wait_for(Milliseconds(30)), std::future_status::timeout);
  const auto second = TcpStore::open(kHost, {.port = port, .world_size = 3});
  const auto joined = server.get();
  EXPECT_EQ(joined->num_keys(), 1) << "the count of users is a key of its own";
  EXPECT_TRUE(first->list_keys().empty()) << "which users do not see";
}

TEST(TcpStore, MissingWorkersAreCountedInTheError) {
  const Failure failure =
      failure_of<DistStoreError>([] { TcpStore::open(kHost, master({.world_size = 3, .timeout = kShort})); });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
  EXPECT_TRUE(mentions(failure, "1/3")) << failure.message;
}

TEST(TcpStore, TheMasterDoesNotWaitForWorkersWhenDisabled) {
  const auto server = TcpStore::open(kHost, master({.world_size = 3, .wait_for_workers = false}));
  EXPECT_EQ(server->num_keys(), 0);
}

std::mutex lines_mutex;
std::string lines;  // guarded by lines_mutex

TEST(TcpStore, WarnsWhenTheListenQueueIsShorterThanTheWorld) {
  set_log_sink([](LogLevel, std::string_view text) {
    const std::lock_guard lock(lines_mutex);
    lines += text;
  });
  TcpStore::open(kHost, master({.world_size = 3, .wait_for_workers = false}));
  const auto seen = [] {
    const std::lock_guard lock(lines_mutex);
    return lines.find("somaxconn") != std::string::npos;
  };
  EXPECT_FALSE(seen());
  TcpStore::open(kHost, master({.world_size = 1'000'000, .wait_for_workers = false}));
  EXPECT_TRUE(seen());
  set_log_sink(nullptr);
}

// ---- sharing a server, handing over a socket ----

TEST(TcpStore, TenantsOfOneProcessShareAServerUntilTheLastOneGoes) {
  auto a = TcpStore::open(kHost, master({.multi_tenant = true}));
  const std::uint16_t port = a->port();
  auto b = TcpStore::open(kHost, {.port = port, .is_master = true, .multi_tenant = true});
  a->set("key", "value");
  EXPECT_EQ(to_text(b->get("key")), "value");
  a.reset();
  EXPECT_EQ(to_text(b->get("key")), "value");
  EXPECT_EQ(failure_of<DistStoreError>([&] {
              TcpStore::open(
                  kHost,
                  {.port = port, .is_master = true, .multi_tenant = true, .secret = JobSecret::mint()});
            }).kind,
            ErrorKind::kUsage)
      << "not with another secret";
  EXPECT_THROW(TcpStore::open(kHost, {.port = port, .is_master = true}), DistNetworkError)
      << "nor without asking";
  b.reset();
  const auto c = TcpStore::open(kHost, {.port = port, .is_master = true, .multi_tenant = true});
  EXPECT_EQ(c->num_keys(), 0) << "a new server";
}

TEST(TcpStore, TakesOverAListeningSocketWhosePortMatches) {
  auto listener = net::Listener::listen(*net::Address::parse(kHost, 0), 4);
  const std::uint16_t port = listener.local().port();
  const auto other = static_cast<std::uint16_t>(port == 1025 ? 1026 : port - 1);
  EXPECT_EQ(failure_of<DistStoreError>([&] {
              TcpStore::open(kHost, {.port = other, .is_master = true, .master_listen_fd = listener.fd()});
            }).kind,
            ErrorKind::kUsage);
  const auto server = TcpStore::open(
      kHost, {.port = port, .is_master = true, .master_listen_fd = listener.release().release()});
  EXPECT_EQ(server->port(), port);
  EXPECT_EQ(TcpStore::open(kHost, {.port = port})->add("n", 1), 1);
}

int bound_socket(const net::Address& address) {
  const int fd = ::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::bind(fd, address.get(), address.length()), 0);
  return fd;
}

TEST(TcpStore, TakesOverABoundSocketThatDoesNotListenYet) {
  const int fd = bound_socket(*net::Address::parse(kHost, 0));
  const std::uint16_t port = net::Address::local_of(fd).port();
  const auto server = TcpStore::open(
      kHost, {.port = port, .is_master = true, .timeout = Milliseconds(5'000), .master_listen_fd = fd});
  EXPECT_EQ(TcpStore::open(kHost, {.port = port})->add("n", 1), 1);
}

TEST(TcpStore, ABoundSocketOpenToTheNetworkDoesNotListenWithoutASecret) {
  const base::Fd everywhere(bound_socket(net::Address::any(AF_INET, 0)));
  EXPECT_THROW(TcpStore::open(kHost, master({.master_listen_fd = everywhere.get()})), DistStoreError);
  int listens = 1;
  socklen_t length = sizeof listens;
  ASSERT_EQ(::getsockopt(everywhere.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &length), 0);
  EXPECT_EQ(listens, 0);
}

TEST(TcpStore, ADescriptorThatIsNotABoundSocketIsRejected) {
  EXPECT_THROW(TcpStore::open(kHost, master({.master_listen_fd = 0})), Error);
  const base::Fd unbound(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_THROW(TcpStore::open(kHost, master({.master_listen_fd = unbound.get()})), Error)
      << "listening would give it a port on every interface";
}

// ---- secrets ----

TEST(TcpStore, OpenToTheNetworkItNeedsASecretOrTheWordInsecure) {
  const Failure failure = failure_of<DistStoreError>([] { TcpStore::open("0.0.0.0", master()); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  EXPECT_TRUE(mentions(failure, "LOCKSTEP_SECRET_FILE")) << failure.message;
  auto everywhere = net::Listener::listen(net::Address::any(AF_INET, 0), 4);
  EXPECT_THROW(TcpStore::open(kHost, master({.master_listen_fd = everywhere.fd()})), DistStoreError)
      << "a socket handed over is looked at as well";
  EXPECT_EQ(TcpStore::open("0.0.0.0", master({.insecure = true}))->num_keys(), 0);
  EXPECT_EQ(TcpStore::open("0.0.0.0", master({.secret = JobSecret::mint()}))->num_keys(), 0);
}

TEST(TcpStore, AWrongMissingOrNeedlessSecretIsAClearErrorAtOnce) {
  const JobSecret secret = JobSecret::mint();
  const auto secured = TcpStore::open(kHost, master({.secret = secret}));
  const auto open = TcpStore::open(kHost, master());
  const auto try_with = [](const TcpStore& server, std::optional<JobSecret> with) {
    const Failure failure = failure_of<DistNetworkError>(
        [&] { TcpStore::open(kHost, {.port = server.port(), .timeout = kPatience, .secret = with}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(mentions(failure, "secret")) << failure.message;
    EXPECT_TRUE(mentions(failure, base::cat(kHost, ":", server.port()))) << failure.message;
  };
  try_with(*secured, JobSecret::mint());
  try_with(*secured, std::nullopt);
  try_with(*open, secret);
  EXPECT_EQ(TcpStore::open(kHost, {.port = secured->port(), .secret = secret})->add("n", 1), 1);
  EXPECT_EQ(open->add("n", 1), 1);
}

}  // namespace
}  // namespace lockstep
