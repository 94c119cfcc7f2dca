// What every store must do. See store_contract.h for how a store joins.
#include "lockstep/store/store_contract.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>

#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/base/long_testing.h"

namespace lockstep {
namespace {

// ---- values ----

TEST_P(StoreContract, GetReturnsWhatWasSet) {
  store_->set("key", "value");
  EXPECT_EQ(to_text(store_->get("key")), "value");
  EXPECT_EQ(to_text(open()->get("key")), "value") << "seen through another handle";
}

TEST_P(StoreContract, SetOverwrites) {
  store_->set("key", "a longer first value");
  store_->set("key", "second");
  EXPECT_EQ(to_text(store_->get("key")), "second");
}

TEST_P(StoreContract, AnEmptyValueIsNotAnAbsentOne) {
  EXPECT_FALSE(store_->check(Keys{"empty"}));
  store_->set("empty", "");
  EXPECT_TRUE(store_->check(Keys{"empty"}));
  EXPECT_TRUE(store_->get("empty").empty());
}

TEST_P(StoreContract, ValuesAndKeysMayHoldAnyBytes) {
  Bytes every(256);
  for (int i = 0; i < 256; ++i) every[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i);
  const std::string odd_key = std::string("a/b -c\n\0d", 9) + "\xff";
  store_->set(odd_key, every);
  store_->set("-key", "dash");
  store_->set("/key", "slash");
  store_->set("", "empty key");
  auto other = open();
  EXPECT_EQ(other->get(odd_key), every);
  EXPECT_EQ(to_text(other->get("-key")), "dash");
  EXPECT_EQ(to_text(other->get("/key")), "slash");
  EXPECT_EQ(to_text(other->get("")), "empty key");
  EXPECT_FALSE(other->check(Keys{"key"}));
}

TEST_P(StoreContract, ALargeValueComesBackUnchanged) {
  Bytes large(long_testing::kUnderTsan ? 2 << 20 : 16 << 20);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::uint8_t>(i * 2654435761u >> 13);
  store_->set("large", large);
  EXPECT_TRUE(open()->get("large") == large);
}

// ---- add ----

TEST_P(StoreContract, AddCountsFromZeroAndKeepsDecimalText) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(to_text(store_->get("n")), "-2");
  EXPECT_EQ(store_->add("zero", 0), 0);
  EXPECT_TRUE(store_->check(Keys{"zero"})) << "adding nothing still makes the key";
}

TEST_P(StoreContract, AddGoesOnFromTextThatIsANumber) {
  store_->set("n", "41");
  EXPECT_EQ(store_->add("n", 1), 42);
}

TEST_P(StoreContract, AddToTextThatIsNotANumberRaisesAndTheStoreSurvives) {
  for (const std::string text : {"forty-one", "", "12x", " 12", "1.5", "99999999999999999999"}) {
    store_->set("text", text);
    const Failure failure = failure_of([&] { store_->add("text", 1); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << '"' << text << '"';
    EXPECT_TRUE(mentions(failure, "text")) << failure.message;
    EXPECT_EQ(to_text(store_->get("text")), text) << "the value stays as it was";
  }
  EXPECT_EQ(store_->add("n", 3), 3) << "the handle still works";
}

TEST_P(StoreContract, AddThatLeavesSixtyFourBitsRaises) {
  store_->add("n", std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(failure_of([&] { store_->add("n", 1); }).kind, ErrorKind::kUsage);
  EXPECT_EQ(store_->add("n", -1), std::numeric_limits<std::int64_t>::max() - 1);
}

TEST_P(StoreContract, AddsFromManyThreadsAreAllCounted) {
  on_threads(4, [](Store& store, int) {
    for (int i = 0; i < 50; ++i) store.add("n", 1);
  });
  EXPECT_EQ(store_->add("n", 0), 200);
}

TEST_P(StoreContract, AddReturnsEachValueOnce) {
  std::vector<std::vector<std::int64_t>> seen(4);
  on_threads(4, [&](Store& store, int i) {
    for (int n = 0; n < 25; ++n) seen[static_cast<std::size_t>(i)].push_back(store.add("n", 1));
  });
  std::set<std::int64_t> all;
  for (const auto& one : seen) all.insert(one.begin(), one.end());
  EXPECT_EQ(all.size(), 100u);
}

TEST_P(StoreContract, OneHandleMayBeUsedByManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, key = base::cat("key", i)] {
      for (int n = 0; n < 25; ++n) {
        store_->set(key, base::cat(key, ':', n));
        if (to_text(store_->get(key)) != base::cat(key, ':', n)) ++wrong;
        store_->add("total", 1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store_->add("total", 0), 100);
}

// ---- compare_set: the four cases ----

TEST_P(StoreContract, CompareSetOnAnAbsentKeyWithNothingExpectedStores) {
  EXPECT_EQ(to_text(store_->compare_set("key", {}, to_bytes("new"))), "new");
  EXPECT_EQ(to_text(store_->get("key")), "new");
}

TEST_P(StoreContract, CompareSetOnTheExpectedValueStores) {
  store_->set("key", "old");
  EXPECT_EQ(to_text(store_->compare_set("key", to_bytes("old"), to_bytes("new"))), "new");
  EXPECT_EQ(to_text(store_->get("key")), "new");
}

TEST_P(StoreContract, CompareSetOnAnotherValueReturnsItAndChangesNothing) {
  store_->set("key", "other");
  EXPECT_EQ(to_text(store_->compare_set("key", to_bytes("old"), to_bytes("new"))), "other");
  EXPECT_EQ(to_text(store_->compare_set("key", {}, to_bytes("new"))), "other");
  EXPECT_EQ(to_text(store_->get("key")), "other");
}

TEST_P(StoreContract, CompareSetOnAnAbsentKeyWithAValueExpectedReturnsTheExpectation) {
  EXPECT_EQ(to_text(store_->compare_set("key", to_bytes("old"), to_bytes("new"))), "old");
  EXPECT_FALSE(store_->check(Keys{"key"}));
}

TEST_P(StoreContract, CompareSetMayStoreAnEmptyValue) {
  store_->set("key", "old");
  EXPECT_TRUE(store_->compare_set("key", to_bytes("old"), {}).empty());
  EXPECT_TRUE(store_->check(Keys{"key"}));
  EXPECT_EQ(to_text(store_->compare_set("key", {}, to_bytes("new"))), "new") << "empty equals empty";
}

TEST_P(StoreContract, OfManyCompareSetsExactlyOneWins) {
  std::atomic<int> winners = 0;
  on_threads(4, [&](Store& store, int i) {
    const std::string mine = base::cat("rank", i);
    if (to_text(store.compare_set("leader", {}, to_bytes(mine))) == mine) ++winners;
  });
  EXPECT_EQ(winners, 1);
}

// ---- check, delete, counting ----

TEST_P(StoreContract, CheckNeedsEveryKey) {
  store_->set("a", "1");
  EXPECT_TRUE(store_->check(Keys{"a"}));
  EXPECT_FALSE(store_->check(Keys{"a", "b"}));
  store_->set("b", "2");
  EXPECT_TRUE(store_->check(Keys{"a", "b"}));
  EXPECT_TRUE(store_->check(Keys{})) << "no keys are all there";
}

TEST_P(StoreContract, DeleteKeyReportsWhetherTheKeyExisted) {
  EXPECT_FALSE(store_->delete_key("key"));
  store_->set("key", "value");
  EXPECT_TRUE(store_->delete_key("key"));
  EXPECT_FALSE(store_->check(Keys{"key"}));
  EXPECT_FALSE(open()->delete_key("key"));
  EXPECT_EQ(store_->add("key", 1), 1) << "a deleted counter starts again";
}

TEST_P(StoreContract, NumKeysCountsUserAndBookkeepingKeys) {
  const std::int64_t none = GetParam().bookkeeping_keys;
  EXPECT_EQ(store_->num_keys(), none);
  store_->set("a", "1");
  store_->set("a", "2");
  store_->add("b", 1);
  EXPECT_EQ(store_->num_keys(), none + 2);
  store_->delete_key("a");
  EXPECT_EQ(store_->num_keys(), none + 1);
  EXPECT_EQ(open()->num_keys(), none + 1);
}

TEST_P(StoreContract, ListKeysNamesTheUsersKeysOnly) {
  EXPECT_TRUE(store_->list_keys().empty());
  store_->multi_set(Keys{"a", "b/c", "gone"}, std::vector<Bytes>(3));
  store_->delete_key("gone");
  Keys keys = store_->list_keys();
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys, (Keys{"a", "b/c"}));
}

// ---- append, multi_get, multi_set ----

TEST_P(StoreContract, AppendCreatesThenConcatenates) {
  store_->append("log", to_bytes("one"));
  store_->append("log", {});
  open()->append("log", to_bytes("+two"));
  EXPECT_EQ(to_text(store_->get("log")), "one+two");
}

TEST_P(StoreContract, AppendOfNothingMakesTheKey) {
  store_->append("log", {});
  EXPECT_TRUE(store_->check(Keys{"log"}));
}

TEST_P(StoreContract, AppendsFromManyThreadsAreAllKeptWhole) {
  on_threads(4, [](Store& store, int i) {
    for (int n = 0; n < 20; ++n) store.append("log", to_bytes(std::string(3, static_cast<char>('a' + i))));
  });
  const std::string log = to_text(store_->get("log"));
  ASSERT_EQ(log.size(), 4u * 20 * 3);
  for (std::size_t i = 0; i < log.size(); i += 3) {
    EXPECT_TRUE(log[i] == log[i + 1] && log[i] == log[i + 2]) << "torn at " << i;
  }
}

TEST_P(StoreContract, MultiSetAndMultiGetKeepTheOrder) {
  store_->multi_set(Keys{"a", "b", "c"}, std::vector{to_bytes("1"), Bytes{}, to_bytes("3")});
  EXPECT_EQ(store_->multi_get(Keys{"c", "a", "b", "a"}),
            (std::vector{to_bytes("3"), to_bytes("1"), Bytes{}, to_bytes("1")}));
  store_->multi_set({}, {});
  EXPECT_TRUE(store_->multi_get({}).empty());
}

TEST_P(StoreContract, MultiSetOfUnequalLengthsRaisesAndSetsNothing) {
  const Failure failure = failure_of([&] { store_->multi_set(Keys{"a", "b"}, std::vector<Bytes>(1)); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  EXPECT_FALSE(store_->check(Keys{"a"}));
  store_->set("a", "still works");
}

}  // namespace
}  // namespace lockstep
