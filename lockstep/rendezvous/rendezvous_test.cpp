// Each scheme, each of its errors, and who may join. Ranks are threads; the environment is restored after
// each test.
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
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

constexpr Milliseconds kPatience{60'000};
constexpr Milliseconds kShort{50};

class Rendezvous : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "rendezvous_XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    logged().clear();
    set_log_level(LogLevel::kInfo);
    set_log_sink([](LogLevel, std::string_view text) {
      const std::lock_guard lock(log_mutex());
      logged() += base::cat(text, '\n');
    });
  }
  void TearDown() override {
    set_log_sink(nullptr);
    set_log_level(LogLevel::kWarn);
    for (const char* name : {"/store", "/secret", "/lockstep.secret"}) ::unlink((folder_ + name).c_str());
    ::rmdir(folder_.c_str());
  }

  // Set and held until the end of the test, all other variables unset.
  void environment(const Variables& variables) {
    for (const auto& [name, text] : variables) CleanEnvironment::set(name, text);
  }

  // A port that nobody listened on a moment ago.
  static std::string free_port() {
    return std::to_string(net::Listener::listen(*net::Address::parse("127.0.0.1", 0), 1).local().port());
  }

  // Every rank comes with `options` and its own rank; each then sends the others its rank and gets the last
  // one's.
  static void expect_to_meet(int world_size, RendezvousOptions options) {
    std::vector<std::future<RendezvousResult>> ranks;
    options.timeout = kPatience;
    for (int rank = 0; rank < world_size; ++rank) {
      options.rank = rank;
      ranks.push_back(std::async(std::launch::async, [options] { return rendezvous(options); }));
    }
    std::vector<RendezvousResult> results;
    for (auto& rank : ranks) results.push_back(rank.get());
    for (int rank = 0; rank < world_size; ++rank) {
      auto& result = results[static_cast<std::size_t>(rank)];
      EXPECT_EQ(result.rank, rank);
      EXPECT_EQ(result.world_size, world_size);
      ASSERT_TRUE(result.store);
      EXPECT_EQ(result.store->timeout(), kPatience);
      EXPECT_EQ(result.store->add("came", 1), rank + 1);
    }
  }

  template <class Class = Error>
  static std::string error_of(const RendezvousOptions& options, ErrorKind kind = ErrorKind::kUsage) {
    try {
      rendezvous(options);
    } catch (const Class& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "raised another class: " << error.what();
      return "";
    }
    ADD_FAILURE() << options.init_method << " raised nothing";
    return "";
  }

  static void expect_words(const std::string& text, const std::vector<std::string>& words) {
    for (const auto& word : words)
      EXPECT_NE(text.find(word), std::string::npos) << word << " is not in: " << text;
  }

  static std::mutex& log_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::string& logged() {
    static std::string lines;
    return lines;
  }

  const CleanEnvironment clean_;
  std::string folder_;
};

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

// ---- the launcher's store, and the secret ----

TEST_F(Rendezvous, WithALaunchersStoreEveryRankIsAClient) {
  const auto launcher =
      TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .wait_for_workers = false});
  environment({{"WORLD_SIZE", "2"},
               {"MASTER_ADDR", "127.0.0.1"},
               {"MASTER_PORT", std::to_string(launcher->port())},
               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
               {"TORCHELASTIC_RESTART_COUNT", "3"}});
  expect_to_meet(2, {});
  EXPECT_EQ(to_text(launcher->get("/worker/attempt_3/came")), "2") << "under torch's prefix for the attempt";
  CleanEnvironment::set("TORCHELASTIC_RESTART_COUNT", "4");
  expect_to_meet(2, {.init_method = base::cat("tcp://127.0.0.1:", launcher->port()), .world_size = 2});
}

TEST_F(Rendezvous, TheStoreOfTorchrunIsNotAskedForTheSecret) {
  JobSecret::mint().write_file(folder_ + "/secret");
  const auto launcher =
      TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .wait_for_workers = false});
  environment({{"WORLD_SIZE", "2"},
               {"MASTER_ADDR", "127.0.0.1"},
               {"MASTER_PORT", std::to_string(launcher->port())},
               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
               {"LOCKSTEP_SECRET_FILE", folder_ + "/secret"}});
  expect_to_meet(2, {});
  EXPECT_NE(logged().find("torchrun's"), std::string::npos) << logged();
}

TEST_F(Rendezvous, TheStoreOfOurLauncherIsAskedForTheSecret) {
  const JobSecret secret = JobSecret::mint();
  secret.write_file(folder_ + "/secret");
  const auto launcher = TcpStore::open(
      "127.0.0.1", {.port = 0, .is_master = true, .wait_for_workers = false, .secret = secret});
  environment({{"WORLD_SIZE", "2"},
               {"MASTER_ADDR", "127.0.0.1"},
               {"MASTER_PORT", std::to_string(launcher->port())},
               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
               {"LOCKSTEP_LAUNCHER", "1"},
               {"LOCKSTEP_SECRET_FILE", folder_ + "/secret"}});
  expect_to_meet(2, {});
  EXPECT_EQ(to_text(launcher->get("came")), "2") << "at the root, where the launcher publishes";
  ::unsetenv("LOCKSTEP_SECRET_FILE");
  EXPECT_THROW(rendezvous({.rank = 0, .timeout = kShort}), DistNetworkError) << "joined without the secret";
}

TEST_F(Rendezvous, ASecretIsUsedWhenOneIsConfigured) {
  JobSecret::mint().write_file(folder_ + "/secret");
  environment({{"LOCKSTEP_SECRET_FILE", folder_ + "/secret"}});
  const std::string port = free_port();
  const RendezvousOptions options{.init_method = "tcp://127.0.0.1:" + port, .rank = 0, .world_size = 1};
  const auto result = rendezvous(options);
  TcpStoreOptions stranger{.port = static_cast<std::uint16_t>(std::stoi(port))};
  stranger.timeout = kShort;
  EXPECT_THROW(TcpStore::open("127.0.0.1", stranger), DistNetworkError);
  EXPECT_EQ(result.store->add("n", 1), 1) << "the stranger disturbed nobody";
}

TEST_F(Rendezvous, AnOpenStoreBeyondLoopbackNeedsASecretOnEveryRank) {
  for (const int rank : {0, 1}) {
    expect_words(error_of({.init_method = "tcp://192.0.2.1:29500", .rank = rank, .world_size = 2}),
                 {"192.0.2.1:29500", "LOCKSTEP_SECRET_FILE", "LOCKSTEP_INSECURE=1"});
  }
}

TEST_F(Rendezvous, InsecureIsAllowedAloud) {
  environment({{"LOCKSTEP_INSECURE", "1"}});
  char host[256] = {};
  ASSERT_EQ(::gethostname(host, sizeof host - 1), 0);
  try {
    net::Address::resolve(host, 0);
  } catch (const Error&) {
    GTEST_SKIP() << "this machine cannot resolve its own name";
  }
  EXPECT_TRUE(rendezvous({.init_method = base::cat("tcp://", host, ":0?rank=0&world_size=1")}).store);
}

TEST_F(Rendezvous, TheLineThatTheErrorPrintsMakesAGoodSecret) {
  const std::string text = error_of({.init_method = "tcp://192.0.2.1:29500", .rank = 0, .world_size = 2});
  const std::string mark = "make one with:  ";
  ASSERT_NE(text.find(mark), std::string::npos) << text;
  const std::size_t start = text.find(mark) + mark.size();
  const std::string line = text.substr(start, text.find('\n', start) - start);
  const std::string script =
      base::cat("cd '", folder_, "' && ", line, " && test \"$LOCKSTEP_SECRET_FILE\" -ef lockstep.secret");
  ASSERT_EQ(std::system(script.c_str()), 0) << script;
  EXPECT_NO_THROW(JobSecret::from_file(folder_ + "/lockstep.secret"));
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
