// Who may join: the launcher's store, and the secret.
#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/bytes.h"
#include "lockstep/net/secret.h"
#include "lockstep/rendezvous/rendezvous_testing.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace rendezvous_testing;

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

}  // namespace
}  // namespace lockstep
