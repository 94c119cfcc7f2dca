#include "lockstep/join/join.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collective.h"

namespace lockstep {
namespace {

// Sums a number over the ranks in every iteration.
class Summing final : public Joinable {
 public:
  explicit Summing(Group group = default_group()) : group_(std::move(group)) {}
  const Group& join_group() const override { return group_; }
  bool shadow_iteration() override {
    sum(0);
    ++n_shadowed;
    return goes_on;
  }
  void finish_join(bool is_last_joiner) override {
    ++n_finished;
    was_last = is_last_joiner;
  }
  double iterate(double mine) {
    begin_iteration();
    if (join_options() != nullptr) counts.push_back(n_active());
    return sum(mine);
  }

  int n_shadowed = 0, n_finished = 0;
  bool was_last = false;
  bool goes_on = true;
  std::vector<int> counts;

 private:
  double sum(double mine) {
    const at::Tensor tensor = at::full({1}, mine, at::kDouble);
    all_reduce(tensor, {.group = group_});
    return tensor.item<double>();
  }
  Group group_;
};

class JoinSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, JoinSizes, ::testing::Values(1, 2, 3, 4));

TEST_P(JoinSizes, RanksWithoutInputShadowTheOthersUntilTheLastIsThrough) {
  const int n = GetParam();
  run_threads(n, [&](int rank) {
    Summing joinable;
    std::vector<double> sums;
    join({joinable}, [&] {
      for (int i = 0; i <= rank; ++i) sums.push_back(joinable.iterate(1));
    });
    for (int i = 0; i <= rank; ++i) {
      EXPECT_EQ(sums[static_cast<std::size_t>(i)], n - i);
      EXPECT_EQ(joinable.counts[static_cast<std::size_t>(i)], n - i);
    }
    EXPECT_EQ(joinable.n_shadowed, n - 1 - rank);
    EXPECT_EQ(joinable.n_finished, 1);
    EXPECT_EQ(joinable.was_last, rank == n - 1);
    joinable.iterate(0);  // the group is in step still
  });
}

TEST(Join, OnlyTheFirstJoinableCountsAndAllAreShadowedInOrder) {
  run_threads(2, [&](int rank) {
    Summing first, second;
    std::vector<double> sums;
    join({first, second}, [&] {
      for (int i = 0; i < 1 + 2 * rank; ++i) {
        sums.push_back(first.iterate(10));
        sums.push_back(second.iterate(1));
      }
    });
    EXPECT_EQ(sums, rank == 0 ? (std::vector<double>{20, 2}) : (std::vector<double>{20, 2, 10, 1, 10, 1}));
    EXPECT_EQ(second.counts, rank == 0 ? (std::vector<int>{2}) : (std::vector<int>{2, 1, 1}));
    EXPECT_EQ(first.n_shadowed, rank == 0 ? 2 : 0);
    EXPECT_EQ(second.n_shadowed, rank == 0 ? 2 : 0);
  });
}

TEST(Join, CanBeRepeatedAndEndsWhereAJoinableEndsIt) {
  run_threads(2, [&](int rank) {
    Summing first, second;
    for (int epoch = 0; epoch < 2; ++epoch) {
      join({first, second}, [&] {
        for (int i = 0; i < 1 + rank; ++i) {
          first.iterate(1);
          second.iterate(1);
        }
      });
    }
    EXPECT_EQ(second.n_shadowed, rank == 0 ? 2 : 0);
    EXPECT_EQ(second.n_finished, 2);
    const std::size_t n_counts = second.counts.size();
    second.iterate(1);  // outside, nothing is counted
    EXPECT_EQ(second.counts.size(), n_counts);
    first.goes_on = false;
    join({first, second}, [&] {
      for (int i = 0; i < 2 * rank; ++i) first.iterate(1);
    });
    EXPECT_EQ(second.n_shadowed, rank == 0 ? 2 : 0);
  });
}

TEST(Join, EvenInputsNeedNoShadowAndEveryRankIsALastOne) {
  run_threads(3, [&](int) {
    Summing joinable;
    join({joinable}, [&] {
      for (int i = 0; i < 3; ++i) EXPECT_EQ(joinable.iterate(1), 3);
    });
    EXPECT_EQ(joinable.n_shadowed, 0);
    EXPECT_TRUE(joinable.was_last);
  });
}

TEST(Join, ARankWithoutAnyInputOnlyShadows) {
  run_threads(2, [&](int rank) {
    Summing joinable;
    join({joinable}, [&] {
      for (int i = 0; i < 4 * rank; ++i) EXPECT_EQ(joinable.iterate(1), 1);
    });
    EXPECT_EQ(joinable.n_shadowed, rank == 0 ? 4 : 0);
  });
}

TEST(Join, InThrowingModeAllRanksRaiseAndTheGroupGoesOn) {
  run_threads(3, [&](int rank) {
    Summing joinable;
    int n_done = 0;
    try {
      join({joinable},
           [&] {
             for (; n_done < 2 + rank; ++n_done) EXPECT_EQ(joinable.iterate(1), 3);
           },
           {.throw_on_early_termination = true});
      FAIL() << "rank " << rank << " did not raise";
    } catch (const InputsExhausted& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kAborted);
      const std::string words = error.what();
      if (rank == 0) {
        EXPECT_NE(words.find("rank 0 has no input left while others have"), std::string::npos) << words;
      } else {
        EXPECT_NE(words.find("1 of 3 ranks have no input left"), std::string::npos) << words;
      }
    }
    EXPECT_EQ(n_done, 2);
    EXPECT_EQ(joinable.n_finished, 0);
    EXPECT_EQ(joinable.iterate(1), 3);
  });
}

TEST(Join, InThrowingModeEvenInputsEndWell) {
  run_threads(2, [&](int) {
    Summing joinable;
    join({joinable}, [&] { joinable.iterate(1); }, {.throw_on_early_termination = true});
    EXPECT_EQ(joinable.n_finished, 1);
  });
}

TEST(Join, WhatTheBodyThrowsPassesWithoutShadowing) {
  run_threads(2, [&](int) {
    Summing joinable;
    EXPECT_THROW(join({joinable}, [] { throw std::logic_error("mine"); }), std::logic_error);
    EXPECT_EQ(joinable.n_finished, 0);
    EXPECT_EQ(joinable.iterate(1), 2);  // no longer joining
    EXPECT_TRUE(joinable.counts.empty());
  });
}

TEST(Join, DisabledItOnlyRunsTheBody) {
  run_threads(2, [&](int) {
    Summing joinable;
    join({joinable}, [&] { EXPECT_EQ(joinable.iterate(1), 2); }, {.enable = false});
    EXPECT_TRUE(joinable.counts.empty());
    EXPECT_EQ(joinable.n_finished, 0);
  });
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "no error";
}

TEST(Join, RefusesNothingDifferentGroupsAndJoinablesInUse) {
  run_threads(2, [&](int) {
    const Group other = new_group();
    Summing here, there(other);
    EXPECT_NE(refusal([&] { join({}, [] {}); }).find("nothing to join"), std::string::npos);
    EXPECT_NE(refusal([&] { join({here, there}, [] {}); }).find("different groups"), std::string::npos);
    EXPECT_NE(refusal([&] { join({here, here}, [] {}); }).find("given twice"), std::string::npos);
    join({here}, [&] {
      EXPECT_NE(refusal([&] { join({here}, [] {}); }).find("being joined already"), std::string::npos);
      here.iterate(1);
    });
    EXPECT_EQ(here.n_finished, 1);
  });
}

TEST(Join, ManyShadowedIterationsAreLoggedOnce) {
  static std::atomic<int> n_told{0};
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarn && text.find("has participated with zeros") != std::string_view::npos)
      ++n_told;
  });
  run_threads(2, [&](int rank) {
    Summing joinable;
    join({joinable}, [&] {
      for (int i = 0; i < 1010 * rank; ++i) joinable.iterate(1);
    });
  });
  set_log_sink(nullptr);
  EXPECT_EQ(n_told, 1);
}

}  // namespace
}  // namespace lockstep
