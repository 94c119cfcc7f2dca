// The cases against what python torch saw when the goldens were made (tools/parity.sh ddp --goldens), and the
// comparison itself.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>

#include "lockstep/base/path_testing.h"
#include "lockstep/collective/collective.h"
#include "tests/parity/cases.h"
#include "tests/parity/record.h"

namespace parity {
namespace {

const std::filesystem::path kGoldens = lockstep::path_testing::from_program(LOCKSTEP_PARITY_GOLDENS);

Record golden(const std::string& name, int rank) {
  return read_record(kGoldens / (name + ".rank" + std::to_string(rank) + ".txt"));
}

// In f64: what another processor rounds differently then lies far below the bound.
Comparison compare_with_golden(const std::function<Record(int, at::ScalarType)>& train,
                               const std::string& name) {
  at::set_num_threads(1);
  std::array<Record, kRanks> ours;
  lockstep::run_threads(kRanks,
                        [&](int rank) { ours[static_cast<std::size_t>(rank)] = train(rank, at::kDouble); });
  Comparison all;
  for (int rank = 0; rank < kRanks; ++rank)
    all.add(compare(ours[static_cast<std::size_t>(rank)], golden(name, rank), Theirs::kSome));
  return all;
}

TEST(Parity, EveryCaseTrainsAsPythonTorchDid) {
  for (const Case& one : cases()) {
    const Comparison result = compare_with_golden(one.train, one.name);
    EXPECT_TRUE(result.within()) << one.name << ": " << result.worst_name << " is " << result.worst
                                 << " away";
    EXPECT_GE(result.n_tensors, 50U) << one.name;
  }
}

TEST(Parity, ABrokenDivisorIsNoticed) {
  const Comparison result = compare_with_golden(train_with_broken_divisor, "plain");
  EXPECT_FALSE(result.within());
  EXPECT_LT(result.worst, std::numeric_limits<double>::infinity()) << result.worst_name;  // by its values
}

TEST(Parity, EveryGoldenBelongsToACase) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kGoldens)) {
    const std::string file = entry.path().filename().string();
    names.insert(file.substr(0, file.find('.')));
  }
  for (const Case& one : cases()) names.erase(one.name);
  EXPECT_TRUE(names.empty()) << *names.begin();
}

// ---- the comparison ----

Record tiny(double value) {
  return {{"a", std::vector<double>{1, value, -2}}, {"b", std::nullopt}};
}

TEST(ParityCompare, JudgesByTheLargestValueOfTheTensor) {
  EXPECT_TRUE(compare(tiny(0.5 + 1.9e-6), tiny(0.5), Theirs::kComplete).within());
  const Comparison far = compare(tiny(0.5 + 2.1e-6), tiny(0.5), Theirs::kComplete);
  EXPECT_FALSE(far.within());
  EXPECT_EQ(far.worst_name, "a");
  EXPECT_EQ(far.n_tensors, 2U);
}

TEST(ParityCompare, NothingAtAllIsNotTheSame) {
  EXPECT_FALSE(compare(tiny(1), {}, Theirs::kSome).within());
}

TEST(ParityCompare, WhatIsMissingIsInfinitelyFarAway) {
  Record less = tiny(1);
  less.erase("b");
  EXPECT_FALSE(compare(less, tiny(1), Theirs::kSome).within());
  EXPECT_FALSE(compare(tiny(1), less, Theirs::kComplete).within());
  EXPECT_TRUE(compare(tiny(1), less, Theirs::kSome).within());
}

TEST(ParityCompare, AGradientOnOneSideOnlyIsInfinitelyFarAway) {
  Record more = tiny(1);
  more["b"] = std::vector<double>{0, 0};
  EXPECT_FALSE(compare(more, tiny(1), Theirs::kComplete).within());
  EXPECT_FALSE(compare(tiny(1), more, Theirs::kComplete).within());
}

TEST(ParityCompare, NaNIsNotTheSameAsAnything) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(compare(tiny(nan), tiny(1), Theirs::kComplete).within());
  EXPECT_FALSE(compare(tiny(1), tiny(nan), Theirs::kComplete).within());
  EXPECT_FALSE(compare(tiny(nan), tiny(nan), Theirs::kComplete).within());
}

TEST(ParityCompare, NothingIsCloseToZerosButZeros) {
  const Record zeros = {{"a", std::vector<double>{0, 0}}}, small = {{"a", std::vector<double>{0, 1e-30}}};
  EXPECT_TRUE(compare(zeros, zeros, Theirs::kComplete).within());
  EXPECT_FALSE(compare(small, zeros, Theirs::kComplete).within());
}

TEST(ParityRecord, ReadsWhatItWrote) {
  const auto path = std::filesystem::path(::testing::TempDir()) /
                    ("lockstep_parity_record_" + std::to_string(::getpid()) + ".txt");
  Record record = tiny(0.1);
  record["c"] = std::vector<double>{1.0 / 3, -1e-300, 1e300};
  write_record(path, record);
  EXPECT_EQ(read_record(path), record);
  std::ofstream(path) << "# words\na 1 2\n";
  EXPECT_EQ(read_record(path), (Record{{"a", std::vector<double>{1, 2}}}));
  for (const char* damaged : {"a 1 2x\n", "a 1 none\n"}) {
    std::ofstream(path) << damaged;
    EXPECT_THROW(read_record(path), std::runtime_error) << damaged;
  }
  std::filesystem::remove(path);
  EXPECT_THROW(read_record(path), std::runtime_error);
}

}  // namespace
}  // namespace parity
