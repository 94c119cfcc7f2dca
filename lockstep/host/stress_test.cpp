// Schedules: 2,000 operations by every way the engine has, 10,000 in the long tests, with random yields and
// sleeps at every point where ranks meet (internal/perturb.h), fixed seeds, and every result checked.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "lockstep/base/long_testing.h"
#include "lockstep/engine/engine_contract_case.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EngineContract);  // only check() is used here

namespace {

using testing::Rank;

// Ranks, and how many operations they do in the long tests. More ranks than cores is where schedules get
// interesting, and slow.
constexpr std::pair<int, int> kWorlds[] = {{2, 4500}, {3, 3000}, {4, 2000}, {7, 700}};

void on_worlds(bool pretend, const std::function<void(Rank&, std::mt19937&, int)>& body) {
  for (const auto& [size, rounds] : kWorlds) {
    if (::testing::Test::HasFailure()) return;
    internal::perturb_seed = 1000u + static_cast<std::uint64_t>(size);
    internal::pretend_processes = pretend;
    testing::with_threads(size, [&, n = long_testing::enabled() ? rounds : rounds / 5](Rank& rank) {
      std::mt19937 random(static_cast<std::uint32_t>(77 + rank.size()));  // the same choices on every rank
      body(rank, random, n);
    });
    internal::pretend_processes = false;
  }
}

constexpr lockstep_op_kind kKinds[] = {LOCKSTEP_ALL_REDUCE,   LOCKSTEP_BROADCAST,      LOCKSTEP_ALL_REDUCE,
                                       LOCKSTEP_ALL_GATHER,   LOCKSTEP_REDUCE_SCATTER, LOCKSTEP_REDUCE,
                                       LOCKSTEP_ALL_REDUCE,   LOCKSTEP_GATHER,         LOCKSTEP_SCATTER,
                                       LOCKSTEP_ALL_TO_ALL,   LOCKSTEP_BARRIER,        LOCKSTEP_ALL_REDUCE,
                                       LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_ALL_GATHER_V};

constexpr std::uint64_t kLarge = kSanitized ? 1200 : 6000;

struct Path {
  std::uint64_t min_count, max_count;  // elements of 4 bytes
  bool shared;
};

void collectives(Rank& rank, std::mt19937& random, int rounds, const Path& path) {
  for (int i = 0; i < rounds && !::testing::Test::HasFailure(); ++i) {
    const auto kind = kKinds[random() % std::size(kKinds)];
    const std::uint64_t count = path.min_count + random() % (path.max_count - path.min_count + 1);
    const int root = static_cast<int>(random() % static_cast<unsigned>(rank.size()));
    const bool in_place = random() % 2 == 0 && (kind == LOCKSTEP_ALL_REDUCE || kind == LOCKSTEP_REDUCE);
    const bool posted = random() % 3 == 0;
    check(rank, {.kind = kind,
                 .dtype = LOCKSTEP_I32,
                 .count = count,
                 .root = root,
                 .in_place = in_place,
                 .shared = path.shared,
                 .posted = posted,
                 .unevenness = 1 + count / 8});
  }
}

TEST(HostStress, SmallCollectivesThatTravelWithTheArrival) {
  on_worlds(false, [](Rank& rank, std::mt19937& random, int rounds) {
    collectives(rank, random, rounds, {0, 256 / static_cast<std::uint64_t>(rank.size()), false});
  });
}

TEST(HostStress, CollectivesInPlaceAmongThreads) {
  on_worlds(false, [](Rank& rank, std::mt19937& random, int rounds) {
    collectives(rank, random, rounds, {300, kLarge, false});
  });
}

TEST(HostStress, CollectivesInPlaceInSharedMemory) {
  on_worlds(true, [](Rank& rank, std::mt19937& random, int rounds) {
    collectives(rank, random, rounds, {300, kLarge, true});
  });
}

TEST(HostStress, CollectivesThroughTheStagingAreas) {
  on_worlds(true, [](Rank& rank, std::mt19937& random, int rounds) {
    collectives(rank, random, rounds, {300, kLarge, false});
  });
}

// Rounds of messages around circles of changing step, several in flight, some from any source.
void messages(Rank& rank, std::mt19937& random, int rounds, std::uint64_t min_count,
              std::uint64_t max_count) {
  const int n = rank.size();
  for (int done = 0; done < rounds && !::testing::Test::HasFailure();) {
    const int flight = 1 + static_cast<int>(random() % 8);
    const int step = static_cast<int>(random() % static_cast<unsigned>(n));
    const bool any = random() % 4 == 0;
    const int to = (rank.rank() + step) % n, from = (rank.rank() + n - step) % n;
    std::vector<std::vector<std::int32_t>> sent, got;
    std::vector<lockstep_handle*> handles;
    for (int k = 0; k < flight; ++k) {
      const std::size_t count = min_count + random() % (max_count - min_count + 1);
      sent.emplace_back(count, rank.rank() * 1000 + k);
      got.emplace_back(count);
    }
    for (int k = 0; k < 2 * flight; ++k) {
      const auto i = static_cast<std::size_t>(k % flight);
      const bool sends = (k < flight) == (rank.rank() % 2 == 0);  // half of them post their receives first
      auto op = Rank::op(sends ? LOCKSTEP_SEND : LOCKSTEP_RECV, sent[i].data(), got[i].data(), got[i].size(),
                         LOCKSTEP_I32);
      op.root = sends ? to : any ? -1 : from;
      op.tag = done % 5;
      handles.push_back(rank.post(op));
    }
    for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
    for (int k = 0; k < flight; ++k) {
      const auto& data = got[static_cast<std::size_t>(k)];
      ASSERT_EQ(data, std::vector<std::int32_t>(data.size(), from * 1000 + k))
          << "message " << k << " of " << flight;
    }
    done += flight;
    // Any source: a round must not receive from the next one, where another rank may be the sender.
    if (!any) continue;
    ASSERT_EQ(rank.barrier(), LOCKSTEP_OK) << rank.error();
  }
}

TEST(HostStress, MessagesThatTravelAtOnce) {
  for (const bool pretend : {false, true}) {
    on_worlds(pretend,
              [](Rank& rank, std::mt19937& random, int rounds) { messages(rank, random, rounds, 0, 200); });
  }
}

// What two threads of one rank post at the same time. The callbacks of one must not run inside the post of the
// other, which may hold a lock that they take.
thread_local bool inside_post = false;
std::atomic<int> n_ended{0}, n_inside{0};

void ended(void*) {
  if (inside_post) ++n_inside;
  ++n_ended;
}

void post_messages(Rank& rank, int rounds, int tag, bool calls_back) {
  int sent = 1, got = 0;
  for (int round = 0; round < rounds; ++round) {
    for (const auto kind : {LOCKSTEP_SEND, LOCKSTEP_RECV}) {
      auto op = Rank::op(kind, &sent, &got, 1, LOCKSTEP_I32);
      op.root = rank.rank();
      op.tag = tag;
      if (calls_back) op.done = ended;
      const int before = n_ended;
      inside_post = !calls_back;
      lockstep_handle* const handle = rank.post(op);
      inside_post = false;
      // A message to oneself that is short: it needs no receive to be over.
      ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
      while (calls_back && n_ended == before) std::this_thread::yield();
    }
  }
}

TEST(HostStress, APostRunsNoCallbacksOfOtherThreads) {
  const int rounds = long_testing::enabled() ? 10'000 : 2000;
  n_ended = n_inside = 0;
  internal::perturb_seed = 5;
  testing::with_threads(1, [&](Rank& rank) {
    std::thread other([&] { post_messages(rank, rounds, 1, true); });
    post_messages(rank, rounds, 2, false);
    other.join();
  });
  EXPECT_EQ(n_ended, 2 * rounds);
  EXPECT_EQ(n_inside, 0);
}

TEST(HostStress, MessagesThatWaitForTheirReceiver) {
  for (const bool pretend : {false, true}) {
    on_worlds(pretend, [](Rank& rank, std::mt19937& random, int rounds) {
      messages(rank, random, rounds, kSanitized ? 1100 : 3000, kSanitized ? 2500 : 12'000);
    });
  }
}

}  // namespace
}  // namespace lockstep::comm
