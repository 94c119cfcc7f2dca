// Meetings and comparisons by themselves: ranks as threads, a hash store, no group.
#include "lockstep/debug/detail/checker.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/debug/detail/rank_list.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using internal::Checker;
using internal::Fingerprint;

constexpr Milliseconds kLong{60'000}, kBrief{50};

// What `fn` raises on each of n ranks; "" where it raises nothing.
std::vector<std::string> raised(int n, const std::function<void(int rank, Store& store)>& fn) {
  HashStore store;
  std::vector<std::string> texts(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank, own = store.clone()] {
      try {
        fn(rank, *own);
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return texts;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Every field is compared, and travels unchanged; an empty shape is not.
TEST(Fingerprint, DiffersInEveryFieldByItsName) {
  const Fingerprint one{.operation = "all_reduce",
                        .sequence = "3",
                        .n_tensors = "1",
                        .dtypes = "float",
                        .devices = "cpu",
                        .shapes = "[2]"};
  const auto sent = Fingerprint::decode(one.encode());
  EXPECT_EQ(sent.text(), one.text());
  EXPECT_EQ(one.differences(sent), "");
  const std::pair<std::string Fingerprint::*, const char*> fields[] = {
      {&Fingerprint::operation, "operation: all_reduce vs x"},
      {&Fingerprint::sequence, "sequence number: 3 vs x"},
      {&Fingerprint::n_tensors, "number of tensors: 1 vs x"},
      {&Fingerprint::dtypes, "dtypes: float vs x"},
      {&Fingerprint::devices, "device types: cpu vs x"},
      {&Fingerprint::shapes, "shapes: [2] vs x"}};
  for (const auto& [field, words] : fields) {
    auto other = one;
    other.*field = "x";
    EXPECT_EQ(one.differences(Fingerprint::decode(other.encode())), words);
  }
  auto any_shape = one;
  any_shape.shapes.clear();
  EXPECT_EQ(one.differences(any_shape), "");
}

TEST(Checker, LetsRanksInStepPassAgainAndAgain) {
  const auto texts = raised(3, [](int rank, Store& store) {
    Checker checker(store, rank, {0, 1, 2});
    for (int i = 0; i < 5; ++i)
      checker.check("test", {.operation = "barrier", .sequence = std::to_string(i)}, kLong, {});
  });
  EXPECT_EQ(texts, std::vector<std::string>(3));
}

TEST(Checker, ReportsOnEveryRankWhatDiffersByWorldRank) {
  const auto texts = raised(2, [](int rank, Store& store) {
    Checker checker(store, rank, {4, 7});
    checker.check("test", {.operation = rank == 0 ? "all_reduce" : "barrier"}, kLong, {});
  });
  for (const auto& text : texts) {
    EXPECT_TRUE(holds(text, "all_reduce") && holds(text, "barrier") && holds(text, "7")) << text;
  }
}

TEST(Checker, NamesTheRankThatIsMissing) {
  const auto texts = raised(2, [](int rank, Store& store) {
    if (rank == 1) return;
    Checker checker(store, rank, {4, 7});
    checker.check("test", {.operation = "barrier"}, kBrief, {});
  });
  EXPECT_TRUE(holds(texts[0], "rank 7")) << texts[0];
}

TEST(Checker, StopsWaitingOnceItIsNoLongerWorthIt) {
  const auto texts = raised(2, [](int rank, Store& store) {
    if (rank == 1) return;
    Checker checker(store, rank, {0, 1});
    checker.check("test", {.operation = "barrier"}, kLong,
                  [] { base::raise(ErrorKind::kPeerLost, "rank 1 is gone"); });
  });
  EXPECT_TRUE(holds(texts[0], "is gone")) << texts[0];
}

TEST(RankList, CutsLongLists) {
  EXPECT_EQ(internal::name_ranks({3}), "rank 3");
  EXPECT_EQ(internal::name_ranks({1, 2}), "ranks 1 2");
  EXPECT_EQ(internal::list_ranks(std::vector<int>(20, 1)), "1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 and 4 more");
}

}  // namespace
}  // namespace lockstep
