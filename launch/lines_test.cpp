// Bytes to lines, lines of many workers to one stream. Time is made up.
#include <gtest/gtest.h>

#include "launch/line_assembler.h"
#include "launch/line_merger.h"

namespace lockstep::launch {
namespace {

using Lines = std::vector<std::string>;
constexpr std::int64_t kSecond = 1'000'000'000;

struct Assembled {
  Lines lines;
  LineAssembler assembler{[this](std::string_view line) { lines.emplace_back(line); }};
};

TEST(LineAssembler, JoinsPiecesToWholeLines) {
  Assembled a;
  a.assembler.feed("one\ntw", 0);
  a.assembler.feed("o\n\n", 1);
  EXPECT_EQ(a.lines, (Lines{"one", "two", ""}));
  EXPECT_TRUE(a.assembler.due().is_never());
}

TEST(LineAssembler, GivesOutAnUnfinishedLineAfterAPauseAndNoEmptyOneForItsEnd) {
  Assembled a;
  a.assembler.feed("password: ", 0);
  EXPECT_EQ(a.assembler.due().monotonic_ns(), LineAssembler::kPauseNs);
  a.assembler.flush_due(LineAssembler::kPauseNs - 1);
  EXPECT_TRUE(a.lines.empty());
  a.assembler.flush_due(LineAssembler::kPauseNs);
  EXPECT_EQ(a.lines, (Lines{"password: "}));
  a.assembler.feed("\nnext\n", kSecond);
  EXPECT_EQ(a.lines, (Lines{"password: ", "next"}));
}

TEST(LineAssembler, WindowsLineEndsAreLineEnds) {
  Assembled a;
  a.assembler.feed("one\r\ntwo\r", 0);
  a.assembler.feed("\n", 0);
  EXPECT_EQ(a.lines, (Lines{"one", "two"}));
}

TEST(LineAssembler, AProgressBarIsShownOnceASecondAndInItsLastState) {
  Assembled a;
  const std::int64_t start = 100 * kSecond;
  for (int i = 0; i <= 100; ++i) {
    a.assembler.feed("\r" + std::to_string(i) + "%", start + i * kSecond / 50);  // two seconds in all
  }
  a.assembler.feed("\n", start + 2 * kSecond);
  ASSERT_FALSE(a.lines.empty());
  EXPECT_LE(a.lines.size(), 4u);
  EXPECT_EQ(a.lines.back(), "100%");
}

TEST(LineAssembler, ALineWithoutEndIsCutAndAtTheEndOfTheStreamGivenOut) {
  Assembled a;
  a.assembler.feed(std::string(LineAssembler::kMaxLine, 'x') + "yz", 0);
  ASSERT_EQ(a.lines.size(), 1u);
  a.assembler.finish();
  EXPECT_EQ(a.lines.back(), "yz");
}

struct Merged {
  explicit Merged(int n)
      : merger(n, [this](const std::vector<int>& workers, Stream, std::string_view line) {
          lines.push_back(rank_set_text(workers) + " " + std::string(line));
        }) {}
  Lines lines;
  LineMerger merger;
};

TEST(LineMerger, ALineThatAllPrintGoesOutOnceAndAtOnce) {
  Merged m(3);
  for (const int worker : {2, 0, 1}) m.merger.add(worker, Stream::kOut, "epoch 1", 0);
  EXPECT_EQ(m.lines, (Lines{"0-2 epoch 1"}));
}

TEST(LineMerger, ALineWaitsForItsTwinsNoLongerThanTheWindow) {
  Merged m(3);
  m.merger.add(0, Stream::kOut, "hello", 0);
  m.merger.add(2, Stream::kOut, "hello", 1);
  EXPECT_TRUE(m.lines.empty());
  EXPECT_EQ(m.merger.due().monotonic_ns(), LineMerger::kWindowNs);
  m.merger.flush_due(LineMerger::kWindowNs);
  EXPECT_EQ(m.lines, (Lines{"0,2 hello"}));
  m.merger.add(1, Stream::kOut, "hello", LineMerger::kWindowNs + 1);
  m.merger.flush_all();
  EXPECT_EQ(m.lines.back(), "1 hello");
}

TEST(LineMerger, EachWorkersLinesKeepTheirOrder) {
  Merged m(2);
  // Worker 1 prints the same lines the other way round: they must not all collapse.
  m.merger.add(0, Stream::kOut, "a", 0);
  m.merger.add(0, Stream::kOut, "b", 0);
  m.merger.add(1, Stream::kOut, "b", 0);
  m.merger.add(1, Stream::kOut, "a", 0);
  m.merger.flush_all();
  EXPECT_EQ(m.lines, (Lines{"0 a", "0,1 b", "1 a"}));
}

TEST(LineMerger, RepeatedLinesOfOneWorkerAreAllPrinted) {
  Merged m(2);
  for (int i = 0; i < 3; ++i) m.merger.add(0, Stream::kOut, "x", 0);
  for (int i = 0; i < 2; ++i) m.merger.add(1, Stream::kOut, "x", 0);
  m.merger.flush_all();
  EXPECT_EQ(m.lines, (Lines{"0,1 x", "0,1 x", "0 x"}));
}

TEST(LineMerger, EqualTextOnStdoutAndStderrIsTwoLines) {
  Merged m(2);
  m.merger.add(0, Stream::kOut, "x", 0);
  m.merger.add(1, Stream::kErr, "x", 0);
  m.merger.flush_all();
  EXPECT_EQ(m.lines, (Lines{"0 x", "1 x"}));
}

TEST(LineMerger, NoLineWaitsForAWorkerThatHasEnded) {
  Merged m(3);
  m.merger.end_worker(1);
  m.merger.add(0, Stream::kOut, "x", 0);
  m.merger.add(2, Stream::kOut, "x", 0);
  EXPECT_EQ(m.lines, (Lines{"0,2 x"}));
}

TEST(LineMerger, ALineOfAWorkerThatHasEndedStillWaitsForItsTwins) {
  Merged m(2);
  m.merger.add(1, Stream::kOut, "x", 0);
  m.merger.end_worker(1);
  EXPECT_TRUE(m.lines.empty());
  m.merger.add(0, Stream::kOut, "x", 0);
  EXPECT_EQ(m.lines, (Lines{"0,1 x"}));
}

TEST(LineMerger, ManyDifferentLinesDoNotPileUp) {
  Merged m(2);
  for (std::size_t i = 0; i < 3 * LineMerger::kMaxWaiting; ++i)
    m.merger.add(0, Stream::kOut, std::to_string(i), 0);
  EXPECT_EQ(m.lines.size(), 2 * LineMerger::kMaxWaiting);
  EXPECT_EQ(m.lines.front(), "0 0");
}

TEST(RankSet, RangesAreShort) {
  EXPECT_EQ(rank_set_text({3}), "3");
  EXPECT_EQ(rank_set_text({0, 1, 2, 3, 5, 7, 8}), "0-3,5,7,8");
}

}  // namespace
}  // namespace lockstep::launch
