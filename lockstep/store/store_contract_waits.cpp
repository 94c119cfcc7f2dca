// The second half of the contract: what waits, queues, and handles on one store. The first, on values, is in
// store_contract.cpp.
#include <algorithm>
#include <atomic>
#include <set>

#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/store/store_contract.h"

namespace lockstep {
namespace {

TEST_P(StoreContract, MultiGetWaitsForWhatIsMissing) {
  store_->set("a", "1");
  auto values = std::async(std::launch::async, [store = open()] { return store->multi_get(Keys{"a", "b"}); });
  let_it_wait();
  store_->set("b", "2");
  EXPECT_EQ(values.get(), (std::vector{to_bytes("1"), to_bytes("2")}));
}

// ---- waiting ----

TEST_P(StoreContract, GetWaitsForTheKey) {
  auto value = std::async(std::launch::async, [store = open()] { return to_text(store->get("late")); });
  let_it_wait();
  store_->set("late", "here");
  EXPECT_EQ(value.get(), "here");
}

std::atomic<int> g_slow_lines{0};

// The key comes once the line was seen.
TEST_P(StoreContract, ASlowWaitIsLoggedOnceAndNamesTheKey) {
  g_slow_lines = 0;
  base::set_slow_wait_time(Milliseconds(5));
  set_log_sink([](LogLevel, std::string_view text) {
    if (text.find("slow: ") == 0 && text.find("late one") != std::string_view::npos) ++g_slow_lines;
  });
  const auto other = open();
  std::thread writer([&] {
    while (g_slow_lines == 0) std::this_thread::sleep_for(Milliseconds(1));
    other->set("late one", "here");
  });
  EXPECT_EQ(to_text(store_->get("late one")), "here");
  writer.join();
  set_log_sink(nullptr);
  base::set_slow_wait_time(Milliseconds(10'000));
  EXPECT_EQ(g_slow_lines, 1);
}

TEST_P(StoreContract, ATimeoutOfZeroOrLessIsRefusedAndChangesNothing) {
  for (const Milliseconds wrong : {Milliseconds(0), Milliseconds(-1), Milliseconds::min()}) {
    EXPECT_EQ(failure_of([&] { store_->set_timeout(wrong); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(failure_of([&] { store_->wait(Keys{"missing"}, wrong); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(failure_of([&] { store_->wait(Keys{}, wrong); }).kind, ErrorKind::kUsage)
        << "no keys, no excuse";
    EXPECT_EQ(failure_of([&] { const StoreTimeoutGuard guard(*store_, wrong); }).kind, ErrorKind::kUsage);
  }
  EXPECT_EQ(store_->timeout(), kPatience);
  store_->set("key", "value");
  EXPECT_EQ(to_text(store_->get("key")), "value");
}

TEST_P(StoreContract, WithoutATimeoutAWaitLastsUntilTheKeyComes) {
  auto store = open();
  store->set_timeout(kNoTimeout);
  EXPECT_EQ(store->timeout(), kNoTimeout);
  auto value = std::async(std::launch::async, [store] { return to_text(store->get("late")); });
  let_it_wait();
  store_->set("late", "here");
  EXPECT_EQ(value.get(), "here");
  auto wait = std::async(std::launch::async, [other = open()] { other->wait(Keys{"later"}, kNoTimeout); });
  let_it_wait();
  store->set("later", "here");  // a write without an end of its own
  EXPECT_NO_THROW(wait.get());
}

TEST_P(StoreContract, EveryWriteWakesEveryWaiter) {
  const std::vector<std::function<void()>> writes = {
      [&] { store_->set("key0", "x"); },
      [&] { store_->add("key1", 1); },
      [&] { store_->append("key2", to_bytes("x")); },
      [&] { store_->compare_set("key3", {}, to_bytes("x")); },
      [&] { store_->multi_set(Keys{"key4"}, std::vector<Bytes>(1)); },
      [&] { store_->queue_push("key5", to_bytes("x")); },
  };
  std::vector<std::future<void>> waiters;
  for (std::size_t i = 0; i < 2 * writes.size(); ++i) {
    waiters.push_back(
        std::async(std::launch::async,
                   [store = open(), key = base::cat("key", i % writes.size())] { store->wait(Keys{key}); }));
  }
  let_it_wait();
  for (const auto& write : writes) write();
  for (auto& waiter : waiters) EXPECT_NO_THROW(waiter.get());
}

TEST_P(StoreContract, WaitNeedsEveryKey) {
  store_->wait(Keys{});
  auto waiter = std::async(std::launch::async, [store = open()] {
    store->wait(Keys{"a", "b"});
    return store->check(Keys{"a", "b"});
  });
  store_->set("b", "2");
  let_it_wait();
  store_->set("a", "1");
  EXPECT_TRUE(waiter.get());
}

TEST_P(StoreContract, AnExpiredWaitNamesTheKeysAndTheMilliseconds) {
  store_->set("present", "x");
  const Failure failure = failure_of([&] { store_->wait(Keys{"present", "missing"}, kShort); });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
  EXPECT_TRUE(mentions(failure, "missing")) << failure.message;
  EXPECT_TRUE(mentions(failure, "30 ms") || mentions(failure, "30ms")) << failure.message;
  EXPECT_EQ(store_->timeout(), kPatience) << "the handle's own timeout is untouched";
}

TEST_P(StoreContract, EveryBlockingCallEndsAtTheHandlesTimeoutAndTheHandleStaysUsable) {
  const StoreTimeoutGuard guard(*store_, kShort);
  const std::vector<std::function<void()>> calls = {
      [&] { store_->get("missing"); },
      [&] { store_->multi_get(Keys{"missing"}); },
      [&] { store_->wait(Keys{"missing"}); },
      [&] { store_->queue_pop("missing"); },
  };
  for (const auto& call : calls) {
    const Failure failure = failure_of(call);
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(mentions(failure, "missing")) << failure.message;
  }
  store_->set_timeout(kPatience);
  store_->set("key", "value");
  EXPECT_EQ(to_text(store_->get("key")), "value");
}

TEST_P(StoreContract, ADeletedKeyIsWaitedForAgain) {
  store_->set("key", "old");
  store_->delete_key("key");
  auto value = std::async(std::launch::async, [store = open()] { return to_text(store->get("key")); });
  let_it_wait();
  store_->set("key", "new");
  EXPECT_EQ(value.get(), "new");
}

// ---- queues ----

TEST_P(StoreContract, AQueueGivesBackInTheOrderOfPushing) {
  for (const std::string entry : {"1", "", "3"}) store_->queue_push("q", to_bytes(entry));
  EXPECT_EQ(store_->queue_len("q"), 3);
  auto other = open();
  EXPECT_EQ(to_text(other->queue_pop("q")), "1");
  EXPECT_EQ(to_text(store_->try_queue_pop("q").value()), "");
  EXPECT_EQ(to_text(store_->queue_pop("q")), "3");
  EXPECT_EQ(other->queue_len("q"), 0);
}

TEST_P(StoreContract, AQueueExistsWhileItIsNotEmpty) {
  EXPECT_EQ(store_->queue_len("q"), 0);
  EXPECT_FALSE(store_->check(Keys{"q"}));
  store_->queue_push("q", to_bytes("x"));
  EXPECT_TRUE(store_->check(Keys{"q"}));
  store_->wait(Keys{"q"});
  store_->queue_pop("q");
  EXPECT_FALSE(store_->check(Keys{"q"}));
}

TEST_P(StoreContract, PoppingAnEmptyQueueWithoutWaitingGivesNothing) {
  EXPECT_EQ(store_->try_queue_pop("q"), std::nullopt);
  store_->queue_push("q", to_bytes("x"));
  store_->queue_pop("q");
  EXPECT_EQ(store_->try_queue_pop("q"), std::nullopt);
}

TEST_P(StoreContract, PopWaitsForAPush) {
  auto value = std::async(std::launch::async, [store = open()] { return to_text(store->queue_pop("q")); });
  let_it_wait();
  store_->queue_push("q", to_bytes("x"));
  EXPECT_EQ(value.get(), "x");
}

TEST_P(StoreContract, OnePushServesOneWaiter) {
  std::atomic<int> served = 0;
  std::vector<std::future<void>> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.push_back(std::async(std::launch::async, [store = open(), &served] {
      store->queue_pop("q");
      ++served;
    }));
  }
  for (int i = 1; i <= 3; ++i) {
    EXPECT_LT(served, i) << "more waiters were served than entries pushed";
    store_->queue_push("q", to_bytes("x"));
    while (served < i) std::this_thread::yield();
  }
  for (auto& waiter : waiters) waiter.get();
  EXPECT_EQ(store_->queue_len("q"), 0);
}

TEST_P(StoreContract, EveryEntryGoesToExactlyOneOfManyPoppers) {
  constexpr int kEach = 20;
  std::vector<Keys> taken(2);
  on_threads(4, [&](Store& store, int i) {
    for (int n = 0; n < kEach; ++n) {
      if (i < 2) {
        store.queue_push("q", to_bytes(base::cat(i, ':', n)));
      } else {
        taken[static_cast<std::size_t>(i - 2)].push_back(to_text(store.queue_pop("q")));
      }
    }
  });
  std::set<std::string> all;
  for (const auto& one : taken) all.insert(one.begin(), one.end());
  EXPECT_EQ(all.size(), 2u * kEach);
  EXPECT_EQ(store_->queue_len("q"), 0);
}

// ---- handles ----

TEST_P(StoreContract, ACloneSharesTheDataAndHasItsOwnTimeout) {
  auto clone = store_->clone();
  EXPECT_EQ(clone->timeout(), kPatience) << "starts with the timeout of its origin";
  clone->set_timeout(Milliseconds(1234));
  EXPECT_EQ(store_->timeout(), kPatience);
  clone->set("key", "value");
  EXPECT_EQ(to_text(store_->get("key")), "value");
}

TEST_P(StoreContract, ACloneWorksWhileItsOriginWaits) {
  auto clone = store_->clone();
  auto value = std::async(std::launch::async, [&] { return to_text(store_->get("late")); });
  let_it_wait();
  EXPECT_EQ(clone->add("n", 1), 1);
  clone->set("late", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreContract, ACloneOutlivesItsOrigin) {
  auto origin = open();
  origin->set("key", "value");
  auto clone = origin->clone();
  origin.reset();
  EXPECT_EQ(to_text(clone->get("key")), "value");
}

TEST_P(StoreContract, TheDefaultTimeoutIsFiveMinutesAndAGuardPutsItBack) {
  auto store = world_->open();
  EXPECT_EQ(store->timeout(), Milliseconds(300'000));
  {
    const StoreTimeoutGuard guard(*store, Milliseconds(7));
    EXPECT_EQ(store->timeout(), Milliseconds(7));
  }
  EXPECT_EQ(store->timeout(), Milliseconds(300'000));
}

TEST_P(StoreContract, DescribesItself) {
  EXPECT_EQ(store_->has_extended_api(), GetParam().extended_api);
  EXPECT_TRUE(store_->describe().starts_with(GetParam().name.substr(0, GetParam().name.find('_'))))
      << store_->describe();
}

}  // namespace
}  // namespace lockstep
