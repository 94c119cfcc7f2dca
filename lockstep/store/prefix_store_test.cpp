// What PrefixStore promises beyond the contract.
#include "lockstep/store/prefix_store.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using Keys = std::vector<std::string>;

TEST(PrefixStore, KeysCarryThePrefixInTheStoreInside) {
  auto hash = std::make_shared<HashStore>();
  PrefixStore store("default_pg", hash);
  store.set("key", "value");
  EXPECT_EQ(hash->list_keys(), Keys{"default_pg/key"});
  EXPECT_EQ(to_text(hash->get("default_pg/key")), "value");
}

TEST(PrefixStore, PrefixesKeepTheirUsersApart) {
  auto hash = std::make_shared<HashStore>();
  PrefixStore a("a", hash), ab("ab", hash);
  ab.set("key", "of ab");
  hash->set("a", "of nobody");
  EXPECT_FALSE(a.check(Keys{"key"}));
  EXPECT_TRUE(a.list_keys().empty()) << "\"ab/key\" begins with \"a\" but is not under it";
  EXPECT_EQ(a.num_keys(), 2) << "the count is the inner store's";
}

TEST(PrefixStore, NestsAndFindsTheStoresBelow) {
  auto hash = std::make_shared<HashStore>();
  auto inner = std::make_shared<PrefixStore>("inner", hash);
  PrefixStore outer("outer", inner);
  outer.set("key", "value");
  EXPECT_EQ(to_text(hash->get("inner/outer/key")), "value");
  EXPECT_EQ(outer.underlying_store(), inner);
  EXPECT_EQ(outer.innermost_store(), hash);
  EXPECT_EQ(inner->innermost_store(), hash);
  EXPECT_EQ(outer.list_keys(), Keys{"key"});
  EXPECT_EQ(outer.describe(), "PrefixStore(outer, PrefixStore(inner, HashStore))");
}

TEST(PrefixStore, TheTimeoutIsThatOfTheStoreInside) {
  auto hash = std::make_shared<HashStore>(HashStoreOptions{.timeout = Milliseconds(11)});
  PrefixStore store("p", hash);
  EXPECT_EQ(store.timeout(), Milliseconds(11));
  store.set_timeout(Milliseconds(22));
  EXPECT_EQ(hash->timeout(), Milliseconds(22));
}

TEST(PrefixStore, NeedsAStore) {
  EXPECT_THROW(PrefixStore("p", nullptr), Error);
}

}  // namespace
}  // namespace lockstep
