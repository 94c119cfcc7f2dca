#include "lockstep/group/call_log.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "lockstep/base/log.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using namespace testing;

struct Seen {
  CallRecord record;
  std::string words;  // of the failure; the record's pointer is gone
};
std::mutex mutex;
std::vector<Seen> seen;  // guarded by mutex

void note(const CallRecord& record) {
  const std::lock_guard lock(mutex);
  seen.push_back({record, record.failure != nullptr ? record.failure->message : ""});
}

std::vector<Seen> of(const std::string& function, std::optional<int> rank) {
  const std::lock_guard lock(mutex);
  std::vector<Seen> found;
  for (const auto& each : seen) {
    if (each.record.function == function && each.record.rank == rank) found.push_back(each);
  }
  return found;
}

class CallLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    seen.clear();
    set_call_logger(&note);
  }
  void TearDown() override { set_call_logger(nullptr); }
};

TEST_F(CallLogTest, RecordsEveryCallThatFails) {
  world(3, [](int rank) {
    const auto pair = new_group({0, 2});
    sum_over({});
    EXPECT_TRUE(of("all_reduce", rank).empty()) << "it ended well";
    refused([] { broadcast(at::ones({1})); }, "neither");
    if (rank == 1) return;
    caught([&] { all_reduce(at::ones({rank + 1}), {.group = pair}); });  // different sizes
    caught([&] { all_reduce(at::ones({1}), {.group = pair}); });         // broken since
    const auto refusals = of("broadcast", rank);
    ASSERT_EQ(refusals.size(), 1u);
    const auto& record = refusals[0].record;
    EXPECT_EQ(record.group, "0");
    EXPECT_EQ(record.backend, "host");
    EXPECT_EQ(record.group_rank, rank);
    EXPECT_EQ(record.group_size, 3);
    EXPECT_EQ(record.world_size, 3);
    EXPECT_FALSE(record.duration_ms);
    EXPECT_NE(record.where.find("call_log_test.cpp:"), std::string::npos);
    EXPECT_NE(refusals[0].words.find("neither src nor group_src"), std::string::npos);
    const auto failures = of("all_reduce", rank);
    ASSERT_EQ(failures.size(), 2u);
    EXPECT_EQ(failures[0].record.group, "1");
    EXPECT_EQ(failures[0].record.group_rank, rank / 2);
    EXPECT_EQ(failures[0].record.group_size, 2);
    EXPECT_NE(failures[0].words.find("different operations"), std::string::npos) << failures[0].words;
  });
}

TEST_F(CallLogTest, TimesTheCallsThatMakeAndLeaveGroups) {
  init_process_group();
  const auto group = new_group({0});
  new_subgroups(1);
  refused([] { new_group({5}); }, "rank 5");
  destroy_process_group();
  const auto made = of("new_group", 0), began = of("init_process_group", 0),
             ended = of("destroy_process_group", std::nullopt);
  ASSERT_EQ(made.size(), 2u);
  EXPECT_GE(made[0].record.duration_ms, 0);
  EXPECT_EQ(made[0].record.group, "1");
  EXPECT_EQ(made[0].record.failure, nullptr);
  EXPECT_NE(made[1].words.find("rank 5"), std::string::npos);
  ASSERT_EQ(began.size(), 1u);
  EXPECT_GE(began[0].record.duration_ms, 0);
  EXPECT_EQ(of("new_subgroups", 0).size(), 1u);
  ASSERT_EQ(ended.size(), 1u);
}

TEST_F(CallLogTest, NumbersTheRanksOfACreatedGroupByItsOwnWorld) {
  const auto store = std::make_shared<HashStore>();
  world(3, [&](int rank) {
    if (rank == 0) return;
    const auto pair = create_group({.store = store, .rank = 2 - rank, .size = 2, .name = "pair"});
    const auto alone = new_group({2 - rank}, {.parent = pair, .use_local_synchronization = true});
    refused([&] { broadcast(at::ones({1}), {.group = alone}); }, "neither");
  });
  for (const int rank : {0, 1}) {
    const auto created = of("create_group", rank), made = of("new_group", rank),
               failed = of("broadcast", rank);
    ASSERT_EQ(created.size(), 1u);
    EXPECT_EQ(created[0].record.world_size, 2);
    EXPECT_GE(created[0].record.duration_ms, 0);
    ASSERT_EQ(made.size(), 1u);
    ASSERT_EQ(failed.size(), 1u);
    EXPECT_EQ(failed[0].record.group_rank, 0);
    EXPECT_EQ(failed[0].record.group_size, 1);
    EXPECT_EQ(failed[0].record.world_size, 2);
  }
}

TEST(CallRecord, AsTextNamesNoRankWhereThereIsNone) {
  CallRecord record{.function = "new_group", .group = "1", .where = "train.cpp:42"};
  EXPECT_EQ(to_text(record), "new_group ended well: group \"1\", not a member, called at train.cpp:42");
  record.rank = 0;
  record.world_size = 4;
  record.duration_ms = 2;
  EXPECT_EQ(
      to_text(record),
      "new_group ended well after 2 ms: group \"1\", not a member (rank 0 of 4 in the world), called at "
      "train.cpp:42");
}

std::vector<std::string> lines;  // guarded by mutex

TEST_F(CallLogTest, WithoutALoggerWritesDebugLines) {
  set_call_logger(nullptr);
  set_log_sink([](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::kDebug) lines.emplace_back(text);
  });
  for (const auto level : {LogLevel::kInfo, LogLevel::kDebug}) {
    set_log_level(level);
    lines.clear();
    world(1, [](int) { refused([] { broadcast(at::ones({1})); }, "neither"); });
    const std::lock_guard lock(mutex);
    const bool told = std::ranges::any_of(lines, [](const auto& line) {
      return line.starts_with(
          "broadcast failed: group \"0\" over none, rank 0 of 1 (rank 0 of 1 in the world), called at");
    });
    EXPECT_EQ(told, level == LogLevel::kDebug);
  }
  set_log_level_from_env();
  set_log_sink(nullptr);
}

TEST_F(CallLogTest, ALoggerThatThrowsAffectsNoOperation) {
  set_call_logger([](const CallRecord&) { throw std::runtime_error("no room"); });
  world(2, [](int) {
    refused([] { broadcast(at::ones({1})); }, "neither");
    EXPECT_EQ(sum_over({}), 3.0f);
  });
}

}  // namespace
}  // namespace lockstep
