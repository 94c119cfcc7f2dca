// TcpStore and libtorch's c10d::TCPStore on one wire, in both directions.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <future>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using Keys = std::vector<std::string>;
using TorchStore = c10::intrusive_ptr<c10d::TCPStore>;
constexpr Milliseconds kShort{50};

std::vector<std::uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const std::vector<std::uint8_t>& value) {
  return {value.begin(), value.end()};
}

TorchStore torch_client(std::uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// ---- our client, torch's server (libuv and plain) ----

class OursOnTorch : public testing::TestWithParam<bool> {
 protected:
  OursOnTorch() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    options.useLibUV = GetParam();
    server_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    store_ = open();
  }
  std::unique_ptr<TcpStore> open() { return TcpStore::open("127.0.0.1", {.port = server_->getPort()}); }

  TorchStore server_;
  std::unique_ptr<TcpStore> store_;
};

TEST_P(OursOnTorch, SharesValues) {
  store_->set("a", "1");
  store_->set("empty", "");
  EXPECT_EQ(text(server_->get("a")), "1");
  EXPECT_TRUE(server_->get("empty").empty());
  server_->set("b", bytes("2"));
  EXPECT_EQ(to_text(store_->get("b")), "2");
  store_->append("a", to_bytes("+"));
  EXPECT_EQ(to_text(store_->get("a")), "1+");
  const Bytes large(3 << 20, 7);
  store_->set("large", large);
  EXPECT_EQ(store_->get("large"), large);
}

TEST_P(OursOnTorch, Counts) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(server_->add("n", -7), -2);
  EXPECT_EQ(to_text(store_->get("n")), "-2");
  EXPECT_EQ(store_->num_keys(), server_->getNumKeys());
}

TEST_P(OursOnTorch, AddToTextIsAUsageErrorAndTheHandleSurvivesThoughTorchDropsIt) {
  store_->set("text", "forty-one");
  try {
    store_->add("text", 1);
    ADD_FAILURE() << "raised nothing";
  } catch (const DistStoreError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
  }
  EXPECT_EQ(store_->add("n", 1), 1);
}

TEST_P(OursOnTorch, ComparesAndSets) {
  EXPECT_EQ(to_text(store_->compare_set("c", {}, to_bytes("x"))), "x");
  EXPECT_EQ(to_text(store_->compare_set("c", to_bytes("no"), to_bytes("y"))), "x");
  EXPECT_EQ(to_text(store_->compare_set("c", to_bytes("x"), to_bytes("y"))), "y");
  EXPECT_EQ(to_text(store_->compare_set("absent", to_bytes("no"), to_bytes("y"))), "no");
}

TEST_P(OursOnTorch, ChecksWaitsDeletesAndTimesOut) {
  EXPECT_FALSE(store_->check(Keys{"k"}));
  EXPECT_THROW(store_->wait(Keys{"k"}, kShort), DistStoreError);
  {
    const StoreTimeoutGuard guard(*store_, kShort);
    EXPECT_THROW(store_->get("k"), DistStoreError);
    EXPECT_THROW(store_->multi_get(Keys{"k", "l"}), DistStoreError);
  }
  auto value = std::async(std::launch::async, [this] { return to_text(store_->get("k")); });
  std::this_thread::sleep_for(Milliseconds(10));
  server_->set("k", bytes("late"));
  EXPECT_EQ(value.get(), "late");
  EXPECT_TRUE(store_->check(Keys{"k"}));
  store_->wait(Keys{"k"});
  EXPECT_TRUE(store_->delete_key("k"));
  EXPECT_FALSE(store_->delete_key("k"));
}

TEST_P(OursOnTorch, SetsAndGetsMany) {
  store_->multi_set(Keys{"m1", "m2"}, std::vector{to_bytes("A"), to_bytes("BB")});
  EXPECT_EQ(text(server_->get("m2")), "BB");
  EXPECT_EQ(store_->multi_get(Keys{"m2", "m1"}), (std::vector{to_bytes("BB"), to_bytes("A")}));
}

TEST_P(OursOnTorch, QueuesAndLists) {
  if (!GetParam()) GTEST_SKIP() << "torch's plain server has no queues";
  store_->queue_push("q", to_bytes("one"));
  store_->queue_len("q");  // pushes have no reply; this one has, so both are in before the next look
  server_->queuePush("q", bytes("two"));
  EXPECT_EQ(server_->queueLen("q"), 2);
  EXPECT_EQ(store_->queue_len("q"), 2);
  EXPECT_EQ(to_text(store_->queue_pop("q")), "one");
  EXPECT_EQ(to_text(store_->try_queue_pop("q").value()), "two");
  EXPECT_FALSE(store_->try_queue_pop("q"));
  store_->set("a", "1");
  EXPECT_EQ(store_->list_keys(), Keys{"a"});
  const StoreTimeoutGuard guard(*store_, kShort);
  EXPECT_THROW(store_->queue_pop("q"), DistStoreError);
  EXPECT_EQ(store_->queue_len("q"), 0);
}

TEST_P(OursOnTorch, ClonesAndDescribes) {
  auto clone = store_->clone();
  clone->set("k", "v");
  EXPECT_EQ(to_text(store_->get("k")), "v");
  EXPECT_FALSE(store_->is_master());
}

INSTANTIATE_TEST_SUITE_P(Servers, OursOnTorch, testing::Bool(),
                         [](const auto& test) { return test.param ? "libuv" : "plain"; });

TEST(OursOnTorchWorld, WorkersOfBothKindsJoinATorchMaster) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.numWorkers = 2;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  auto worker = TcpStore::open("127.0.0.1", {.port = server->getPort(), .world_size = 2});
  server->waitForWorkers();
  EXPECT_EQ(worker->num_keys(), 1);
}

// ---- torch's client, our server ----

class TorchOnOurs : public testing::Test {
 protected:
  std::unique_ptr<TcpStore> server_ = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true});
  TorchStore client_ = torch_client(server_->port());
};

TEST_F(TorchOnOurs, SharesValues) {
  client_->set("a", bytes("1"));
  client_->set("empty", {});
  EXPECT_EQ(to_text(server_->get("a")), "1");
  EXPECT_TRUE(client_->get("empty").empty());
  server_->set("b", "2");
  EXPECT_EQ(text(client_->get("b")), "2");
  client_->append("a", bytes("+"));
  EXPECT_EQ(text(client_->get("a")), "1+");
  const std::vector<std::uint8_t> large(3 << 20, 7);
  client_->set("large", large);
  EXPECT_EQ(client_->get("large"), large);
}

TEST_F(TorchOnOurs, Counts) {
  EXPECT_EQ(client_->add("n", 5), 5);
  EXPECT_EQ(server_->add("n", -7), -2);
  EXPECT_EQ(text(client_->get("n")), "-2");
  EXPECT_EQ(client_->getNumKeys(), 1);
  EXPECT_EQ(client_->listKeys(), Keys{"n"});
}

TEST_F(TorchOnOurs, AddToTextEndsOnlyThatClientAsTorchsServerDoes) {
  client_->set("text", bytes("forty-one"));
  EXPECT_ANY_THROW(client_->add("text", 1));
  EXPECT_EQ(to_text(server_->get("text")), "forty-one");
  EXPECT_EQ(torch_client(server_->port())->add("n", 1), 1);
}

TEST_F(TorchOnOurs, ComparesAndSets) {
  EXPECT_EQ(text(client_->compareSet("c", {}, bytes("x"))), "x");
  EXPECT_EQ(text(client_->compareSet("c", bytes("no"), bytes("y"))), "x");
  EXPECT_EQ(text(client_->compareSet("c", bytes("x"), bytes("y"))), "y");
  EXPECT_EQ(text(client_->compareSet("absent", bytes("no"), bytes("y"))), "no");
}

TEST_F(TorchOnOurs, ChecksWaitsDeletesAndTimesOut) {
  EXPECT_FALSE(client_->check({"k"}));
  EXPECT_ANY_THROW(client_->wait({"k"}, kShort));
  EXPECT_EQ(client_->add("n", 1), 1) << "in step after the cancellation";
  auto value = std::async(std::launch::async, [this] { return text(client_->get("k")); });
  std::this_thread::sleep_for(Milliseconds(10));
  server_->set("k", "late");
  EXPECT_EQ(value.get(), "late");
  EXPECT_TRUE(client_->check({"k"}));
  EXPECT_TRUE(client_->deleteKey("k"));
  EXPECT_FALSE(client_->deleteKey("k"));
}

TEST_F(TorchOnOurs, SetsAndGetsMany) {
  client_->multiSet({"m1", "m2"}, {bytes("A"), bytes("BB")});
  EXPECT_EQ(client_->multiGet({"m2", "m1"}), (std::vector{bytes("BB"), bytes("A")}));
}

TEST_F(TorchOnOurs, Queues) {
  client_->queuePush("q", bytes("one"));
  EXPECT_EQ(client_->queueLen("q"), 1);  // pushes have no reply; this one has, so the order is certain
  server_->queue_push("q", to_bytes("two"));
  EXPECT_EQ(server_->queue_len("q"), 2);
  EXPECT_EQ(text(client_->queuePop("q", true)), "one");
  EXPECT_EQ(client_->queueLen("q"), 1);
  EXPECT_EQ(text(client_->queuePop("q", false)), "two");
  EXPECT_ANY_THROW(client_->queuePop("q", false));
  auto value = std::async(std::launch::async, [this] { return text(client_->queuePop("q", true)); });
  auto other = torch_client(server_->port());
  auto second = std::async(std::launch::async, [&] { return text(other->queuePop("q", true)); });
  std::this_thread::sleep_for(Milliseconds(10));
  server_->queue_push("q", to_bytes("x"));
  server_->queue_push("q", to_bytes("y"));
  const std::string both = value.get() + second.get();
  EXPECT_TRUE(both == "xy" || both == "yx") << both;
}

TEST_F(TorchOnOurs, ClonesAndLongWaitsDoNotDisturbEachOther) {
  auto waiting = std::async(std::launch::async, [this] { return text(client_->get("late")); });
  auto clone = torch_client(server_->port())->clone();
  for (int i = 0; i < 100; ++i) clone->add("n", 1);
  clone->set("late", bytes("here"));
  EXPECT_EQ(waiting.get(), "here");
}

TEST(TorchOnOursWorld, TorchWorkersJoinOurMaster) {
  auto server =
      TcpStore::open("127.0.0.1", {.port = 0, .world_size = 2, .is_master = true, .wait_for_workers = false});
  c10d::TCPStoreOptions options;
  options.port = server->port();
  options.numWorkers = 2;
  auto worker = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  EXPECT_EQ(server->num_keys(), 1);
  EXPECT_TRUE(worker->listKeys().empty());
}

TEST(TorchOnOursSecret, TorchCannotJoinAStoreWithASecretAndDoesNotDisturbIt) {
  auto server = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .secret = JobSecret::mint()});
  c10d::TCPStoreOptions options;
  options.port = server->port();
  options.timeout = Milliseconds(200);
  EXPECT_ANY_THROW(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  EXPECT_EQ(server->add("n", 1), 1);
}

}  // namespace
}  // namespace lockstep
