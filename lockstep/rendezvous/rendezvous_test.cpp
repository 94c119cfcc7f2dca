// Each scheme and each of its errors.
#include "lockstep/rendezvous/rendezvous.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <mutex>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/address.h"
#include "lockstep/net/secret.h"
#include "lockstep/net/socket.h"
#include "lockstep/rendezvous/clean_environment.h"
#include "lockstep/rendezvous/internal/detect.h"
#include "lockstep/rendezvous/internal/url.h"
#include "lockstep/rendezvous/rendezvous_testing.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace rendezvous_testing;

// ---- env:// ----

TEST_F(Rendezvous, WithNothingSetIsAWorldOfOneWithoutAStore) {
  const RendezvousResult result = rendezvous();
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.world_size, 1);
  EXPECT_FALSE(result.store);
}

TEST_F(Rendezvous, AWorldOfOneBecauseNothingIsSetIsOneWarningThatNamesTheLauncher) {
  internal::told_alone() = false;
  set_log_level(LogLevel::kWarn);
  rendezvous();
  EXPECT_NE(logged().find("lockstep run -n "), std::string::npos) << logged();
  EXPECT_EQ(std::ranges::count(logged(), '\n'), 1) << logged();
  rendezvous();
  EXPECT_EQ(std::ranges::count(logged(), '\n'), 1) << "told once per process: " << logged();
  environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  rendezvous();
  EXPECT_EQ(std::ranges::count(logged(), '\n'), 1) << "a world of one that was asked for: " << logged();
}

TEST_F(Rendezvous, AWorldOfOneNeedsNoAddress) {
  environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_FALSE(rendezvous().store);
}

TEST_F(Rendezvous, EnvMeetsAtTheMasterAddress) {
  environment({{"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", free_port()}});
  expect_to_meet(3, {});
}

TEST_F(Rendezvous, EnvTakesRankAndWorldSizeFromTheVariables) {
  environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "0"}});
  const auto result = rendezvous();
  EXPECT_EQ(result.world_size, 1);
  ASSERT_TRUE(result.store) << "an address was asked for";
  EXPECT_EQ(result.store->add("n", 1), 1);
}

TEST_F(Rendezvous, ArgumentsOverrideTheVariables) {
  environment(
      {{"RANK", "7"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", free_port()}});
  expect_to_meet(2, {.world_size = 2});
}

TEST_F(Rendezvous, EnvMeetsUnderOpenMpiOnOneHostWithoutAnAddress) {
  environment({{"OMPI_COMM_WORLD_RANK", "0"},
               {"OMPI_COMM_WORLD_SIZE", "2"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
               {"PMIX_NAMESPACE", base::cat("test-", ::getpid())}});
  expect_to_meet(2, {});
}

TEST_F(Rendezvous, EnvNamesEachMissingVariable) {
  environment({{"MASTER_ADDR", "127.0.0.1"}});
  // An address without a place was meant to be a world of many.
  CleanEnvironment::set("MASTER_PORT", "1");
  EXPECT_NE(error_of({.world_size = 2}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({.rank = 0}).find("WORLD_SIZE"), std::string::npos);
  ::unsetenv("MASTER_PORT");
  EXPECT_NE(error_of({.rank = 0, .world_size = 2}).find("MASTER_PORT is not set"), std::string::npos);
  ::unsetenv("MASTER_ADDR");
  EXPECT_NE(error_of({.rank = 0, .world_size = 2}).find("MASTER_ADDR is not set"), std::string::npos);
}

TEST_F(Rendezvous, AnAddressWithoutARankIsNotAWorldOfOne) {
  environment({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_NE(error_of({}).find("RANK is not set"), std::string::npos);
}

TEST_F(Rendezvous, OpenMpiAcrossHostsRequiresTheMasterAddress) {
  environment(
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_NE(error_of({}).find("MASTER_ADDR is not set"), std::string::npos);
}

// ---- tcp:// ----

TEST_F(Rendezvous, TcpMeetsAtItsAddress) {
  expect_to_meet(2, {.init_method = "tcp://127.0.0.1:" + free_port(), .world_size = 2});
  expect_to_meet(2, {.init_method = "tcp://localhost:" + free_port() + "?world_size=2"});
}

TEST_F(Rendezvous, TcpTakesRankAndWorldSizeFromTheUrl) {
  const auto result = rendezvous({.init_method = "tcp://127.0.0.1:0?rank=0&world_size=1"});
  EXPECT_EQ(result.rank, 0);
  EXPECT_EQ(result.world_size, 1);
  EXPECT_TRUE(result.store);
}

TEST_F(Rendezvous, TcpNamesWhatIsMissing) {
  expect_words(error_of({.init_method = "tcp://:29500", .rank = 0, .world_size = 2}), {"host is missing"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1", .rank = 0, .world_size = 2}), {"port is missing"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:", .rank = 0, .world_size = 2}),
               {"port is missing"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1", .world_size = 2}), {"rank is missing"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1", .rank = 0}), {"world_size is missing"});
}

TEST_F(Rendezvous, TcpChecksThePort) {
  for (const std::string port : {"65536", "-1", "http", "1x"}) {
    const std::string url = "tcp://127.0.0.1:" + port;
    expect_words(error_of({.init_method = url, .rank = 0, .world_size = 2}), {url, "port", "0 to 65535"});
  }
  expect_words(error_of({.init_method = "tcp://127.0.0.1:0", .rank = 0, .world_size = 2}), {"port 0"});
}

TEST_F(Rendezvous, WhatIsInTheUrlIsNotAlsoAnArgument) {
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1?rank=0", .rank = 0, .world_size = 2}),
               {"rank is given in the URL", "argument"});
  expect_words(error_of({.init_method = "env://?world_size=2", .rank = 0, .world_size = 2}),
               {"world_size is given in the URL", "argument"});
}

TEST_F(Rendezvous, PlacesOutsideTheWorldAreRefused) {
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1", .rank = 2, .world_size = 2}),
               {"rank is 2", "0 to 1"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1?rank=-1&world_size=2"}), {"rank", "\"-1\""});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1?world_size=0", .rank = 0}),
               {"world_size", "\"0\""});
  expect_words(error_of({.init_method = "env://", .rank = -1, .world_size = 2}), {"rank is -1"});
  expect_words(error_of({.init_method = "env://", .rank = 0, .world_size = 0}), {"world_size is 0"});
}

TEST_F(Rendezvous, ATimeoutOfZeroOrLessIsRefusedInAnyWorld) {
  for (const std::string url :
       {"env://", "tcp://127.0.0.1:1?rank=0&world_size=1", "file:///tmp/x?rank=0&world_size=1"}) {
    expect_words(error_of({.init_method = url, .timeout = Milliseconds(0)}),
                 {"timeout of 0 ms", "kNoTimeout"});
    expect_words(error_of({.init_method = url, .timeout = Milliseconds(-1)}), {"timeout of -1 ms"});
  }
}

TEST_F(Rendezvous, AnOpenEndedMeetingHasNoSizeAndOnlyTheRankThatWasGiven) {
  const std::string url = "tcp://127.0.0.1:" + free_port();
  const auto server = rendezvous({.init_method = url, .rank = 0, .open_ended = true});
  EXPECT_EQ(server.rank, 0);
  EXPECT_EQ(server.world_size, std::nullopt);
  const auto client = rendezvous({.init_method = url, .world_size = 2, .open_ended = true});
  EXPECT_EQ(client.rank, std::nullopt);
  EXPECT_EQ(client.world_size, std::nullopt);
  const std::string path = base::cat("file://", folder_, "/open");
  EXPECT_EQ(rendezvous({.init_method = path, .open_ended = true}).rank, std::nullopt);
}

TEST_F(Rendezvous, AnUnreachableAddressIsNamed) {
  const std::string port = free_port();
  const std::string text = error_of<DistNetworkError>(
      {.init_method = "tcp://127.0.0.1:" + port, .rank = 1, .world_size = 2, .timeout = kShort},
      ErrorKind::kTimeout);
  expect_words(text, {"127.0.0.1", port, "50 ms"});
}

TEST_F(Rendezvous, RanksThatDoNotComeAreCounted) {
  const std::string text = error_of<DistStoreError>(
      {.init_method = "tcp://127.0.0.1:" + free_port(), .rank = 0, .world_size = 3, .timeout = kShort},
      ErrorKind::kTimeout);
  expect_words(text, {"1/3"});
}

TEST_F(Rendezvous, MulticastIsRejected) {
  for (const std::string host : {"224.66.41.62", "239.1.1.1", "[ff02::1]"}) {
    expect_words(error_of({.init_method = "tcp://" + host + ":1", .rank = 0, .world_size = 2},
                          ErrorKind::kUnsupported),
                 {"multicast"});
  }
}

TEST_F(Rendezvous, UseLibuvIsAcceptedAndSaysThatThereIsOneServer) {
  EXPECT_TRUE(rendezvous({.init_method = "tcp://127.0.0.1:0?rank=0&world_size=1&use_libuv=1"}).store);
  EXPECT_EQ(logged().find("one server"), std::string::npos);
  EXPECT_TRUE(rendezvous({.init_method = "tcp://127.0.0.1:0?rank=0&world_size=1&use_libuv=0"}).store);
  EXPECT_NE(logged().find("use_libuv=0"), std::string::npos);
  environment({{"USE_LIBUV", "0"}});
  EXPECT_TRUE(rendezvous({.init_method = "tcp://127.0.0.1:0?rank=0&world_size=1"}).store);
  EXPECT_NE(logged().find("USE_LIBUV=0"), std::string::npos);
}

// ---- file:// ----

TEST_F(Rendezvous, FileMeetsInTheFileAndRemovesIt) {
  expect_to_meet(3, {.init_method = base::cat("file://", folder_, "/store?world_size=3")});
  EXPECT_NE(::access((folder_ + "/store").c_str(), F_OK), 0);
}

TEST_F(Rendezvous, FileNamesWhatIsMissing) {
  expect_words(error_of({.init_method = "file://", .rank = 0, .world_size = 2}), {"path is missing"});
  expect_words(error_of({.init_method = "file://relative/path", .rank = 0, .world_size = 2}),
               {"file:///relative/path"});
  expect_words(error_of({.init_method = "file:///a/b", .world_size = 2}), {"rank is missing"});
  expect_words(error_of({.init_method = "file:///a/b", .rank = 0}), {"world_size is missing"});
  expect_words(error_of<DistStoreError>({.init_method = "file:///no/such/folder", .rank = 0, .world_size = 2},
                                        ErrorKind::kSystem),
               {"/no/such/folder"});
}

TEST_F(Rendezvous, AFileLeftByAnEarlierJobIsPointedOut) {
  const RendezvousOptions options{.init_method = base::cat("file://", folder_, "/store?rank=0&world_size=2")};
  const pid_t earlier = ::fork();
  if (earlier == 0) {
    const auto kept = rendezvous(options);
    ::_exit(logged().find("left the file behind") == std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(earlier, &status, 0), earlier);
  EXPECT_EQ(status, 0);
  rendezvous(options);
  EXPECT_NE(logged().find("left the file behind"), std::string::npos);
}

TEST_F(Rendezvous, AProcessMayMeetInItsFileSeveralTimes) {
  const RendezvousOptions options{.init_method = base::cat("file://", folder_, "/store?rank=0&world_size=2")};
  const auto group = rendezvous(options);
  const auto rpc = rendezvous(options);
  EXPECT_EQ(logged().find("left the file behind"), std::string::npos);
}

// ---- schemes ----

TEST_F(Rendezvous, AnUnknownSchemeIsAnErrorThatNamesTheKnownOnes) {
  expect_words(error_of({.init_method = "etcd://host:1"}), {"etcd", "env, tcp, file"});
  expect_words(error_of({.init_method = "127.0.0.1:29500"}), {"127.0.0.1:29500", "not a URL"});
  expect_words(error_of({.init_method = "tcp://127.0.0.1:1?rnk=0"}), {"rnk"});
}

TEST_F(Rendezvous, ARegisteredSchemeIsAskedAndRegisteredOnce) {
  register_rendezvous_handler("mine", [](const RendezvousOptions& options) {
    EXPECT_EQ(options.init_method, "mine://here?and=there");
    return RendezvousResult{std::make_shared<HashStore>(), options.rank, 4};
  });
  const auto result = rendezvous({.init_method = "mine://here?and=there", .rank = 3});
  EXPECT_EQ(result.rank, 3);
  EXPECT_EQ(result.world_size, 4);
  EXPECT_TRUE(result.store);
  const auto handler = [](const RendezvousOptions&) { return RendezvousResult{}; };
  EXPECT_THROW(register_rendezvous_handler("mine", handler), Error);
  EXPECT_THROW(register_rendezvous_handler("tcp", handler), Error);
  EXPECT_THROW(register_rendezvous_handler("null", nullptr), Error);
}

TEST_F(Rendezvous, WhatAHandlerReturnsIsChecked) {
  register_rendezvous_handler("no-store", [](const auto&) { return RendezvousResult{nullptr, 0, 2}; });
  register_rendezvous_handler("bad-rank", [](const auto&) { return RendezvousResult{nullptr, 2, 2}; });
  expect_words(error_of({.init_method = "no-store://"}), {"no-store", "no store"});
  expect_words(error_of({.init_method = "bad-rank://"}), {"bad-rank", "rank is 2"});
  register_rendezvous_handler("no-rank", [](const auto&) {
    return RendezvousResult{std::make_shared<HashStore>(), std::nullopt, 2};
  });
  expect_words(error_of({.init_method = "no-rank://"}), {"no-rank", "no rank"});
  EXPECT_FALSE(rendezvous({.init_method = "no-rank://", .open_ended = true}).rank);
}

// ---- URLs ----

TEST(Url, IsParsedIntoItsParts) {
  const auto url = internal::parse_url("tcp://[::1]:80/a/b?rank=1&flag&x=y=z");
  EXPECT_EQ(url.scheme, "tcp");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, "80");
  EXPECT_EQ(url.path, "/a/b");
  EXPECT_EQ(url.query, (std::map<std::string, std::string>{{"rank", "1"}, {"flag", ""}, {"x", "y=z"}}));
}

TEST(Url, RefusesNonsense) {
  for (const std::string text :
       {"", "://", "tcp:/x", "tcp://[::1", "tcp://[::1]x", "tcp://h:1?rank=0&rank=1"}) {
    EXPECT_THROW(internal::parse_url(text), Error) << text;
  }
}

}  // namespace
}  // namespace lockstep
