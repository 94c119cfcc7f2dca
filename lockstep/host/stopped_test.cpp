// A process that is stopped in the middle of an operation and goes on after the others have given it up:
// whatever a call has returned an error for is the caller's own memory again, and what the stopped rank read
// meanwhile is no result. Linked with the perturbed library, which stops a rank at a chosen touch of
// another's memory (internal/perturb.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>

#include "lockstep/base/fork_testing.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm {
namespace {

using fork_testing::Children;
using fork_testing::Shared;
using testing::EngineRank;
using testing::FolderKv;
using testing::KvSpace;
using testing::Rank;

constexpr std::size_t kCount = 300'000;  // elements of a rank's block: several chunks by every path
constexpr std::int32_t kMine = 0x5e5e5e5e;

struct Words {
  std::atomic<std::uint64_t> stopped, finished;
  std::atomic<std::int64_t> pid;  // of rank 1, which is stopped
};

// What the words said before the two ranks met for a scene: once they have, rank 1 may be stopped before rank
// 0 looks.
struct Before {
  explicit Before(const Words& words) : stopped(words.stopped), finished(words.finished) {}
  std::uint64_t stopped, finished;
};

struct Scene {
  lockstep_op_kind kind;
  int root;  // for a message: who sends
  const char* name;
};
// Rank 1 writes into rank 0's memory, as far as anyone may, or reads from it.
constexpr Scene kScenes[] = {
    {LOCKSTEP_ALL_REDUCE, 0, "all_reduce"},
    {LOCKSTEP_REDUCE, 0, "reduce"},
    {LOCKSTEP_REDUCE, 1, "reduce to the stopped rank"},
    {LOCKSTEP_BROADCAST, 1, "broadcast"},
    {LOCKSTEP_BROADCAST, 0, "broadcast to the stopped rank"},
    {LOCKSTEP_SCATTER, 1, "scatter"},
    {LOCKSTEP_SCATTER, 0, "scatter to the stopped rank"},
    {LOCKSTEP_GATHER, 0, "gather"},
    {LOCKSTEP_GATHER, 1, "gather to the stopped rank"},
    {LOCKSTEP_ALL_GATHER, 0, "all_gather"},
    {LOCKSTEP_REDUCE_SCATTER, 0, "reduce_scatter"},
    {LOCKSTEP_ALL_TO_ALL, 0, "all_to_all"},
    {LOCKSTEP_SEND, 1, "send"},
    {LOCKSTEP_SEND, 0, "recv"},
};

std::int32_t value(int rank, std::size_t i) {
  return static_cast<std::int32_t>((i % 1000) * 2) + rank;
}

// Two blocks of memory, ordinary or the engine's.
class Buffer {
 public:
  Buffer(EngineRank& rank, bool shared) : rank_(rank), own_(shared ? 0 : 2 * kCount) { take(shared); }
  ~Buffer() { give(); }
  Buffer(const Buffer&) = delete;
  std::int32_t* data() { return data_; }
  std::span<std::int32_t> all() { return {data_, 2 * kCount}; }
  // Gives memory of the engine back and asks for as much again: most likely the same.
  void renew() {
    if (!own_.empty()) return;
    give();
    take(true);
  }

 private:
  void take(bool shared) {
    void* memory = own_.data();
    CHILD_EXPECT(!shared || Rank::engine().alloc(rank_.comm(), 2 * kCount * 4, &memory) == LOCKSTEP_OK,
                 "alloc");
    data_ = static_cast<std::int32_t*>(memory);
  }
  void give() {
    if (own_.empty()) Rank::engine().free(rank_.comm(), data_);
  }
  EngineRank& rank_;
  std::vector<std::int32_t> own_;
  std::int32_t* data_ = nullptr;
};

lockstep_op op_of(const Scene& scene, int rank, Buffer& send, Buffer& recv) {
  const bool message = scene.kind == LOCKSTEP_SEND;
  const bool in_place = scene.kind == LOCKSTEP_BROADCAST;
  const auto kind = message && rank != scene.root ? LOCKSTEP_RECV : scene.kind;
  auto op = Rank::op(kind, in_place ? recv.data() : send.data(), recv.data(), kCount, LOCKSTEP_I32);
  op.root = message ? 1 - rank : scene.root;
  return op;
}

// Element i of what `rank` should receive; nothing where it receives nothing.
std::optional<std::int32_t> expected(const Scene& scene, int rank, std::size_t i) {
  const std::size_t block = i / kCount, at = i % kCount;
  const auto only_root = [&](std::int32_t v) { return rank == scene.root ? std::optional(v) : std::nullopt; };
  const bool first = block == 0;
  switch (scene.kind) {
    case LOCKSTEP_ALL_REDUCE:
      return first ? std::optional(value(0, at) + value(1, at)) : std::nullopt;
    case LOCKSTEP_REDUCE:
      return first ? only_root(value(0, at) + value(1, at)) : std::nullopt;
    case LOCKSTEP_BROADCAST:
      return first ? std::optional(value(scene.root, at)) : std::nullopt;
    case LOCKSTEP_SCATTER:
      return first ? std::optional(value(scene.root, static_cast<std::size_t>(rank) * kCount + at))
                   : std::nullopt;
    case LOCKSTEP_GATHER:
      return only_root(value(static_cast<int>(block), at));
    case LOCKSTEP_ALL_GATHER:
      return value(static_cast<int>(block), at);
    case LOCKSTEP_REDUCE_SCATTER: {
      const std::size_t from = static_cast<std::size_t>(rank) * kCount + at;
      return first ? std::optional(value(0, from) + value(1, from)) : std::nullopt;
    }
    case LOCKSTEP_ALL_TO_ALL:
      return value(static_cast<int>(block), static_cast<std::size_t>(rank) * kCount + at);
    default:
      return first && rank != scene.root ? std::optional(value(scene.root, at)) : std::nullopt;
  }
}

void check(const Scene& scene, int rank, Buffer& recv, const std::string& what) {
  for (std::size_t i = 0; i < 2 * kCount; ++i) {
    const auto want = expected(scene, rank, i);
    CHILD_EXPECT(!want || recv.all()[i] == *want, base::cat(what, ": element ", i, " is ", recv.all()[i]));
  }
}

// The rank that is stopped: a call that reports success has the right result.
void be_stopped(const Scene& scene, EngineRank& rank, Buffer& send, Buffer& recv, int touch, Words& words,
                const std::string& what) {
  internal::stop_at_touch = touch;
  const auto status = rank.run(op_of(scene, 1, send, recv));
  internal::stop_at_touch = 0;
  words.finished.fetch_add(1);
  if (status == LOCKSTEP_OK) check(scene, 1, recv, what);
}

// Uses memory for something else once a call has returned, and lets the stopped rank go on.
void expect_untouched(std::initializer_list<Buffer*> buffers, std::uint64_t finished, Words& words,
                      const std::string& what) {
  for (Buffer* buffer : buffers) std::ranges::fill(buffer->all(), kMine);
  do {
    ::kill(static_cast<pid_t>(words.pid), SIGCONT);
    ::usleep(200);
  } while (words.finished == finished);
  for (Buffer* buffer : buffers) {
    CHILD_EXPECT(std::ranges::all_of(buffer->all(), [](std::int32_t x) { return x == kMine; }),
                 base::cat("memory was written to after ", what));
  }
}

// The other one: gives up once its peer has stopped, by a deadline or by an abort, and takes its memory back.
void give_up(const Scene& scene, EngineRank& rank, Buffer& send, Buffer& recv, int touch, Words& words,
             const Before& before, const std::string& what) {
  auto op = op_of(scene, 0, send, recv);
  const bool by_deadline = touch == 1 && (scene.kind == LOCKSTEP_ALL_REDUCE || scene.kind == LOCKSTEP_SEND);
  if (by_deadline) op.deadline_ns = Deadline::after(Milliseconds(60)).monotonic_ns();
  auto* const handle = rank.post(op);
  while (rank.table().test(handle) == LOCKSTEP_PENDING && words.stopped == before.stopped) ::usleep(100);
  if (!by_deadline && words.stopped != before.stopped)
    rank.table().comm_abort(rank.comm(), "the test gives up");
  const auto status = rank.finish(handle);
  if (status == LOCKSTEP_OK) {
    check(scene, 0, recv, what);
  } else if (touch == 2) {
    recv.renew();
  }
  expect_untouched({&send, &recv}, before.finished, words,
                   base::cat(what, ", which ended with status ", status));
}

// The same, but that the other process is stopped from outside, at any instruction, `delay_us` into the
// operation.
void stop_and_give_up(const Scene& scene, EngineRank& rank, Buffer& send, Buffer& recv, int delay_us,
                      Words& words, const Before& before, const std::string& what) {
  auto* const handle = rank.post(op_of(scene, 0, send, recv));
  ::usleep(static_cast<useconds_t>(delay_us));
  ::kill(static_cast<pid_t>(words.pid), SIGSTOP);
  rank.table().comm_abort(rank.comm(), "the test gives up");
  const auto status = rank.finish(handle);
  if (status == LOCKSTEP_OK) check(scene, 0, recv, what);
  expect_untouched({&send, &recv}, before.finished, words,
                   base::cat(what, ", which ended with status ", status));
}

// In a group of its own, since it ends broken.
void play(int r, Rank& world, testing::Kv& kv, bool shared, int n,
          const std::function<void(EngineRank&, Buffer& send, Buffer& recv)>& act) {
  const KvSpace space(kv, base::cat("scene", n));
  EngineRank rank(Rank::engine(), space.host(), r, 2,
                  {.timeout = Milliseconds(20'000), .parent = world.comm(), .parent_ranks = {0, 1}});
  Buffer send(rank, shared), recv(rank, shared);
  for (std::size_t i = 0; i < 2 * kCount; ++i) send.all()[i] = recv.all()[i] = value(r, i);
  act(rank, send, recv);
}

void play_all(int r, Rank& world, testing::Kv& kv, bool shared, Words& words) {
  int n = 0;
  for (const Scene& scene : kScenes) {
    for (const int touch : long_testing::kUnderTsan ? std::vector{1, 2} : std::vector{1, 2, 3, 5}) {
      const std::string what =
          base::cat(scene.name, shared ? ", shared memory" : "", ", stopped at touch ", touch);
      const Before before(words);
      play(r, world, kv, shared, n++, [&](EngineRank& rank, Buffer& send, Buffer& recv) {
        if (r == 1) be_stopped(scene, rank, send, recv, touch, words, what);
        if (r == 0) give_up(scene, rank, send, recv, touch, words, before, what);
      });
    }
  }
}

// An operation takes some 100 us; what others do on the machine spreads the moments further.
void play_at_any_moment(int r, Rank& world, testing::Kv& kv, bool shared, Words& words) {
  const int rounds = (long_testing::kUnderTsan ? 1 : 4) * static_cast<int>(std::size(kScenes));
  for (int n = 0; n < rounds; ++n) {
    const Scene& scene = kScenes[static_cast<std::size_t>(n) % std::size(kScenes)];
    const int delay_us = n * 37 % 500;
    const std::string what =
        base::cat(scene.name, shared ? ", shared memory" : "", ", stopped after ", delay_us, " us");
    const Before before(words);
    play(r, world, kv, shared, n, [&](EngineRank& rank, Buffer& send, Buffer& recv) {
      if (r == 1) be_stopped(scene, rank, send, recv, 0, words, what);
      if (r == 0) stop_and_give_up(scene, rank, send, recv, delay_us, words, before, what);
    });
  }
}

// Rank 0 takes pages in the second block of a buffer from rank 1, which is stopped, and then gathers into the
// whole buffer.
void gather_where_pages_were_taken(int r, Rank& world, testing::Kv& kv, bool shared, Words& words) {
  Buffer send(world, shared), recv(world, shared);
  for (std::size_t i = 0; i < kCount; ++i) send.data()[i] = value(r, i);
  const auto in_group = [&](const std::string& name, const std::function<void(EngineRank&)>& act) {
    const KvSpace space(kv, name);
    EngineRank rank(Rank::engine(), space.host(), r, 2,
                    {.timeout = Milliseconds(20'000), .parent = world.comm(), .parent_ranks = {0, 1}});
    act(rank);
  };
  in_group("taken", [&](EngineRank& rank) {
    // Few: each rank reduces its own half, so rank 1 does touch the memory of rank 0, and is stopped.
    std::int32_t* const part = recv.data() + kCount + kCount / 4;
    const auto op = Rank::op(LOCKSTEP_ALL_REDUCE, part, part, 8'192, LOCKSTEP_I32);
    if (r == 1) {
      internal::stop_at_touch = 1;
      rank.run(op);
      words.finished.fetch_add(1);
      return;
    }
    auto* const handle = rank.post(op);
    while (words.stopped == 0) ::usleep(100);
    rank.table().comm_abort(rank.comm(), "the test gives up");
    CHILD_EXPECT(rank.finish(handle) == LOCKSTEP_ABORTED, "the operation ended well");
    while (words.finished == 0) {
      ::kill(static_cast<pid_t>(words.pid), SIGCONT);
      ::usleep(200);
    }
  });
  for (int n = 0; n < 5; ++n) {
    in_group(base::cat("gather", n), [&](EngineRank& rank) {
      std::ranges::fill(recv.all(), kMine);
      const auto op = Rank::op(LOCKSTEP_GATHER, send.data(), recv.data(), kCount, LOCKSTEP_I32);
      // Rank 0 is there first and asleep, so that most of the bytes are written by rank 1.
      if (r == 1) ::usleep(2'000);
      auto* const handle = rank.post(op);
      CHILD_EXPECT(rank.finish(handle) == LOCKSTEP_OK, rank.error());
      if (r == 0) check({LOCKSTEP_GATHER, 0, "gather"}, 0, recv, base::cat("gather ", n));
    });
  }
}

using Play = void (*)(int r, Rank& world, testing::Kv& kv, bool shared, Words& words);

void run_ranks(Play play, bool shared, Words& words) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&] {
      Rank world(kv.host(), r, 2);
      internal::stopped = &words.stopped;
      internal::patience_ms = 5;
      if (r == 1) words.pid = ::getpid();
      while (words.pid == 0) ::usleep(100);
      play(r, world, folder, shared, words);
    });
  }
  EXPECT_EQ(ranks.status(0), 0);
  ::kill(static_cast<pid_t>(words.pid), SIGCONT);
  EXPECT_EQ(ranks.status(1), 0);
}

TEST(Gather, ReachesAllOfTheRootsBufferAfterPagesOfItWereTakenFromAStoppedRank) {
  const Shared<Words> words;
  run_ranks(gather_where_pages_were_taken, true, *words);
}

class StoppedRank : public ::testing::TestWithParam<bool> {};

TEST_P(StoppedRank, NeverTouchesMemoryAfterTheOthersGaveUp) {
  const Shared<Words> words;
  run_ranks(play_all, GetParam(), *words);
  EXPECT_GT(words->stopped, std::size(kScenes)) << "hardly ever was a rank stopped inside an operation";
}

TEST_P(StoppedRank, AtAnyMomentNeverTouchesMemoryAfterTheOthersGaveUp) {
  const Shared<Words> words;
  run_ranks(play_at_any_moment, GetParam(), *words);
}

INSTANTIATE_TEST_SUITE_P(Memory, StoppedRank, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "shared" : "ordinary"; });

}  // namespace
}  // namespace lockstep::comm
