// Functional collectives, and gradients across ranks against one process that holds every rank's input in one
// graph.
#include "lockstep/collective/functional.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <latch>
#include <numeric>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/differentiable.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::world;

namespace dist = differentiable;
using List = std::vector<at::Tensor>;

constexpr int kSizes[] = {2, 3, 4};

void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "") {
  EXPECT_TRUE(at::allclose(actual, expected)) << what << " got\n" << actual << "\nexpected\n" << expected;
}

// A rank's input: rows that differ everywhere.
at::Tensor input(int rank, std::int64_t rows = 4) {
  return ((at::arange(rows * 3, at::kDouble) + 1) * (rank + 1)).sin().reshape({rows, 3});
}
// A loss whose gradient differs in every element, rank and output.
at::Tensor loss(const List& outputs, int rank) {
  at::Tensor sum;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto term = (outputs[i] * outputs[i]).sum() * (rank + 1.0 + 0.1 * static_cast<double>(i));
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

// What one collective does to one rank, and what all of it is in one process: the outputs of every rank, from
// the inputs of every rank.
struct Case {
  std::function<List(const at::Tensor& mine, int rank, int n)> across;
  std::function<std::vector<List>(const List& inputs)> at_once;
};

// First and second derivatives of all ranks' losses with respect to every rank's input.
void expect_gradients(const Case& what, const std::function<at::Tensor(int rank, int n)>& input_of) {
  for (const int n : kSizes) {
    List inputs, gradients, seconds;
    at::Tensor total;
    for (int r = 0; r < n; ++r) inputs.push_back(input_of(r, n).set_requires_grad(true));
    const auto outputs = what.at_once(inputs);
    for (int r = 0; r < n; ++r) {
      const auto one = loss(outputs[static_cast<std::size_t>(r)], r);
      total = total.defined() ? total + one : one;
    }
    gradients = torch::autograd::grad({total}, inputs, {}, true, /*create_graph=*/true);
    at::Tensor squares;
    for (const auto& gradient : gradients) {
      const auto square = (gradient * gradient).sum();
      squares = squares.defined() ? squares + square : square;
    }
    seconds = torch::autograd::grad({squares}, inputs, {}, true, false, /*allow_unused=*/true);

    world(n, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      auto mine = input_of(rank, n).set_requires_grad(true);
      const auto results = what.across(mine, rank, n);
      ASSERT_EQ(results.size(), outputs[r].size());
      for (std::size_t i = 0; i < results.size(); ++i) expect_near(results[i], outputs[r][i], "forward");
      const auto first = torch::autograd::grad({loss(results, rank)}, {mine}, {}, true, true).front();
      expect_near(first, gradients[r], "gradient");
      const auto second = torch::autograd::grad({(first * first).sum()}, {mine}).front();
      expect_near(second, seconds[r].defined() ? seconds[r] : at::zeros_like(second), "second");
    });
  }
}
void expect_gradients(const Case& what) {
  expect_gradients(what, [](int rank, int) { return input(rank); });
}

at::Tensor sum_of(const List& inputs) {
  return at::stack(inputs).sum(0);
}
std::vector<List> everywhere(const List& inputs, const List& outputs) {
  return std::vector<List>(inputs.size(), outputs);
}

TEST(Gradients, OfAllReduceAreAllReduced) {
  expect_gradients({[](const at::Tensor& mine, int, int) { return List{dist::all_reduce(mine)}; },
                    [](const List& inputs) { return everywhere(inputs, {sum_of(inputs)}); }});
  expect_gradients(
      {[](const at::Tensor& mine, int, int) { return List{dist::all_reduce(mine, {.op = ReduceOp::kAvg})}; },
       [](const List& inputs) { return everywhere(inputs, {at::stack(inputs).mean(0)}); }});
  expect_gradients({[](const at::Tensor& mine, int rank, int) {
                      return List{dist::all_reduce(mine, {.op = ReduceOp::premul_sum(rank + 0.5)})};
                    },
                    [](const List& inputs) {
                      List scaled;
                      for (std::size_t r = 0; r < inputs.size(); ++r)
                        scaled.push_back(inputs[r] * (static_cast<double>(r) + 0.5));
                      return everywhere(inputs, {sum_of(scaled)});
                    }});
}

TEST(Gradients, OfBroadcastAreReducedToTheSource) {
  expect_gradients({[](const at::Tensor& mine, int, int) { return List{dist::broadcast(mine, 1)}; },
                    [](const List& inputs) {
                      auto outputs = everywhere(inputs, {inputs[1]});
                      // Every input is in the graph, with no weight.
                      for (auto& output : outputs) output.front() = output.front() + sum_of(inputs) * 0;
                      return outputs;
                    }});
}

TEST(Gradients, OfReduceAreBroadcast) {
  expect_gradients({[](const at::Tensor& mine, int rank, int n) {
                      const auto sum = dist::reduce(mine, n - 1);
                      return List{rank == n - 1 ? sum : sum * 0};
                    },
                    [](const List& inputs) {
                      std::vector<List> outputs(inputs.size(), {sum_of(inputs) * 0});
                      outputs.back() = {sum_of(inputs)};
                      return outputs;
                    }});
}

TEST(Gradients, OfGatherAreScattered) {
  expect_gradients({[](const at::Tensor& mine, int, int) { return dist::gather(mine, 1); },
                    [](const List& inputs) {
                      List zeros;
                      for (const auto& one : inputs) zeros.push_back(one * 0);
                      std::vector<List> outputs(inputs.size(), zeros);
                      outputs[1] = inputs;
                      return outputs;
                    }});
}

TEST(Gradients, OfScatterAreGathered) {
  const auto cut = [](const at::Tensor& whole, int n) { return whole.chunk(n, 0); };
  expect_gradients({[&](const at::Tensor& mine, int, int n) { return List{dist::scatter(cut(mine, n), 1)}; },
                    [&](const List& inputs) {
                      std::vector<List> outputs;
                      for (const auto& part : cut(inputs[1], static_cast<int>(inputs.size())))
                        outputs.push_back({part + sum_of(inputs).sum() * 0});
                      return outputs;
                    }},
                   [](int rank, int n) { return input(rank, 2 * n); });
}

TEST(Gradients, OfAllGatherAreReduceScattered) {
  expect_gradients({[](const at::Tensor& mine, int, int) { return dist::all_gather(mine); },
                    [](const List& inputs) { return everywhere(inputs, inputs); }});
}

TEST(Gradients, OfReduceScatterAreAllGathered) {
  for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    expect_gradients({[&](const at::Tensor& mine, int, int n) {
                        return List{dist::reduce_scatter(mine.chunk(n, 0), {.op = op})};
                      },
                      [&](const List& inputs) {
                        auto whole = sum_of(inputs);
                        if (op == ReduceOp::kAvg) whole = whole / static_cast<double>(inputs.size());
                        std::vector<List> outputs;
                        for (const auto& part : whole.chunk(static_cast<std::int64_t>(inputs.size()), 0))
                          outputs.push_back({part});
                        return outputs;
                      }},
                     [](int rank, int n) { return input(rank, 2 * n); });
  }
}

// Rank r sends r + 2 i + 1 rows to rank i.
std::vector<std::int64_t> rows_sent(int rank, int n) {
  std::vector<std::int64_t> rows;
  for (int i = 0; i < n; ++i) rows.push_back(rank + 2 * i + 1);
  return rows;
}
std::vector<std::int64_t> rows_received(int rank, int n) {
  std::vector<std::int64_t> rows;
  for (int i = 0; i < n; ++i) rows.push_back(i + 2 * rank + 1);
  return rows;
}
at::Tensor uneven_input(int rank, int n) {
  const auto rows = rows_sent(rank, n);
  return input(rank, std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
}
std::vector<List> exchanged(const List& inputs) {
  const int n = static_cast<int>(inputs.size());
  std::vector<List> outputs(inputs.size());
  for (int from = 0; from < n; ++from) {
    const auto parts = inputs[static_cast<std::size_t>(from)].split_with_sizes(rows_sent(from, n));
    for (std::size_t to = 0; to < parts.size(); ++to) outputs[to].push_back(parts[to]);
  }
  return outputs;
}

TEST(Gradients, OfAllToAllGoBackTheSameWay) {
  expect_gradients({[](const at::Tensor& mine, int rank, int n) {
                      List templates;
                      for (const auto count : rows_received(rank, n))
                        templates.push_back(at::full({count, 3}, 0.0, at::kDouble));
                      return dist::all_to_all(templates, mine.split_with_sizes(rows_sent(rank, n)));
                    },
                    exchanged},
                   uneven_input);
  expect_gradients({[](const at::Tensor& mine, int rank, int n) {
                      return List{dist::all_to_all_single(mine, {.output_split_sizes = rows_received(rank, n),
                                                                 .input_split_sizes = rows_sent(rank, n)})};
                    },
                    [](const List& inputs) {
                      std::vector<List> outputs;
                      for (const auto& parts : exchanged(inputs)) outputs.push_back({at::cat(parts)});
                      return outputs;
                    }},
                   uneven_input);
}

TEST(Gradients, FlowThroughTheFunctionalForms) {
  expect_gradients(
      {[](const at::Tensor& mine, int, int) { return List{functional::all_gather_tensor_autograd(mine, 1)}; },
       [](const List& inputs) { return everywhere(inputs, {at::cat(inputs, 1)}); }});
  expect_gradients(
      {[](const at::Tensor& mine, int, int) {
         return List{functional::reduce_scatter_tensor_autograd(mine.t(), 1)};
       },
       [](const List& inputs) {
         std::vector<List> outputs;
         for (const auto& part : sum_of(inputs).t().chunk(static_cast<std::int64_t>(inputs.size()), 1))
           outputs.push_back({part});
         return outputs;
       }},
      [](int rank, int n) { return input(rank, 2 * n); });
  expect_gradients(
      {[](const at::Tensor& mine, int, int) { return List{functional::all_to_all_single_autograd(mine)}; },
       [](const List& inputs) {
         std::vector<List> outputs(inputs.size());
         for (std::size_t to = 0; to < inputs.size(); ++to) {
           List parts;
           for (const auto& one : inputs)
             parts.push_back(one.chunk(static_cast<std::int64_t>(inputs.size()))[to]);
           outputs[to] = {at::cat(parts)};
         }
         return outputs;
       }},
      [](int rank, int n) { return input(rank, 2 * n); });
}

TEST(Gradients, AreComputedInTheGroupOfTheForwardPass) {
  world(4, [](int rank) {
    const auto group = new_group(rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3},
                                 {.use_local_synchronization = true});
    auto mine = input(rank).set_requires_grad(true);
    const auto sum = dist::all_reduce(mine, {.group = group});
    expect_near(sum, input(rank % 2) + input(rank % 2 + 2));
    (sum * (rank + 1)).sum().backward();
    expect_near(mine.grad(), at::full_like(mine, rank % 2 == 0 ? 1 + 3 : 2 + 4));
  });
}

TEST(Gradients, NeedNoWorldOnTheThreadThatRunsBackward) {
  world(2, [](int rank) {
    auto mine = input(rank).set_requires_grad(true);
    const auto sum = dist::all_reduce(mine);
    std::string words;
    {
      const base::Thread other("backward", [&] {
        try {
          (sum * (rank + 1)).sum().backward();
        } catch (const std::exception& error) {
          words = error.what();
        }
      });
    }
    EXPECT_EQ(words, "");
    expect_near(mine.grad(), at::full_like(mine, 3));
  });
}

TEST(Gradients, AreRefusedWhereThereAreNone) {
  world(2, [](int rank) {
    auto mine = input(rank).set_requires_grad(true);
    const auto words = [&](const std::function<void()>& fn, ErrorKind kind) -> std::string {
      try {
        fn();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind) << error.what();
        return error.what();
      }
      return "nothing was raised";
    };
    EXPECT_NE(words([&] { dist::all_reduce(mine, {.op = ReduceOp::kMax}); }, ErrorKind::kUnsupported)
                  .find("MAX has no gradient across ranks"),
              std::string::npos);
    const auto largest = dist::all_reduce(mine.detach(), {.op = ReduceOp::kMax});
    EXPECT_FALSE(largest.requires_grad());
    EXPECT_NE(words([&] { dist::scatter({mine}); }, ErrorKind::kUsage).find("needs 2 tensors"),
              std::string::npos);
    EXPECT_NE(words([&] { dist::all_to_all({mine}, {mine}); }, ErrorKind::kUsage).find("one per rank, 2"),
              std::string::npos);
    EXPECT_NE(words([&] { dist::all_reduce(at::Tensor()); }, ErrorKind::kUsage).find("undefined"),
              std::string::npos);
  });
}

TEST(Functional, LeavesItsInputsAlone) {
  for (const int n : {1, 2, 3, 4}) {
    world(n, [n](int rank) {
      List all;
      for (int r = 0; r < n; ++r) all.push_back(input(r, 2 * n));
      const auto mine = input(rank, 2 * n);
      expect_near(functional::all_reduce(mine), sum_of(all));
      expect_near(functional::all_reduce(mine, {.op = ReduceOp::kMax}), at::stack(all).amax(0));
      expect_near(functional::broadcast(mine, n - 1), all.back());
      expect_near(functional::all_gather_tensor(mine), at::cat(all));
      expect_near(functional::all_gather_tensor(mine, -1), at::cat(all, 1));
      expect_near(functional::all_gather_tensor(mine.t(), 1), at::cat(all).t());
      expect_near(functional::reduce_scatter_tensor(mine),
                  sum_of(all).chunk(n)[static_cast<std::size_t>(rank)]);
      expect_near(functional::reduce_scatter_tensor(mine.t(), 1, {.op = ReduceOp::kAvg}),
                  (sum_of(all) / n).t().chunk(n, 1)[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(functional::all_gather_tensor(at::full({}, rank)).wait().sizes(),
                (std::vector<std::int64_t>{n}));
      EXPECT_TRUE(at::equal(mine, input(rank, 2 * n)));
    });
  }
}

TEST(Functional, ExchangesUnevenParts) {
  world(3, [](int rank) {
    const functional::AllToAllSingleOptions splits{.output_split_sizes = rows_received(rank, 3),
                                                   .input_split_sizes = rows_sent(rank, 3)};
    List inputs;
    for (int r = 0; r < 3; ++r) inputs.push_back(uneven_input(r, 3));
    expect_near(functional::all_to_all_single(uneven_input(rank, 3), splits),
                at::cat(exchanged(inputs)[static_cast<std::size_t>(rank)]));
  });
}

TEST(Functional, CoalescedFormsGiveOneResultPerTensor) {
  world(2, [](int rank) {
    const List mine = {input(rank), input(rank + 5).to(at::kFloat)};
    const auto before = default_group()->sequence_number();
    functional::all_reduce_coalesced({input(rank), input(rank), input(rank)}).back().wait();
    EXPECT_EQ(default_group()->sequence_number(), before + 1) << "one operation";
    EXPECT_TRUE(functional::all_reduce_coalesced({}).empty());
    const auto sums = functional::all_reduce_coalesced(mine);
    expect_near(sums[0], input(0) + input(1));
    expect_near(sums[1], (input(5) + input(6)).to(at::kFloat));
    const auto gathered = functional::all_gather_into_tensor_coalesced(mine);
    expect_near(gathered[1], at::cat({input(5), input(6)}).to(at::kFloat));
    const auto parts = functional::reduce_scatter_tensor_coalesced({input(rank), input(rank).t()}, {0, 1});
    expect_near(parts[0], (input(0) + input(1)).chunk(2)[static_cast<std::size_t>(rank)]);
    expect_near(parts[1], (input(0) + input(1)).chunk(2)[static_cast<std::size_t>(rank)].t());
    EXPECT_THROW(functional::reduce_scatter_tensor_coalesced(mine, {0}), Error);
  });
}

TEST(Functional, ReturnsBeforeEveryRankHasComeAndWaitsOnFirstUse) {
  std::latch returned(1);
  world(2, [&](int rank) {
    if (rank == 1) returned.wait();
    const auto sum = functional::all_reduce(input(rank));
    if (rank == 0) {
      EXPECT_FALSE(sum.done());
      EXPECT_THROW(sum.result(), Error);
      returned.count_down();
    }
    const auto copy = sum;
    expect_near(copy.wait() * 2, (input(0) + input(1)) * 2);
    EXPECT_TRUE(sum.done());
    expect_near(sum.result(), input(0) + input(1));
    EXPECT_EQ(sum.error(), nullptr);
    int n_called = 0;
    sum.on_done([&](const functional::AsyncTensor& ready) { n_called += ready.result().defined() ? 1 : 0; });
    EXPECT_EQ(n_called, 1);
    EXPECT_EQ(sum->sizes(), input(0).sizes());
    EXPECT_FALSE(functional::AsyncTensor().wait().defined());
  });
}

TEST(Functional, TellsWhatFollowsOfAFailure) {
  std::latch over(1);
  world(2, [&](int rank) {
    if (rank == 1) return over.wait();
    std::latch told(1);
    // Gathered on dimension 1: the result is made of what came, which here never did.
    const auto sum = functional::all_gather_tensor(input(0), 1, {.timeout = Milliseconds(20)});
    sum.on_done([&](const functional::AsyncTensor& failed) {
      EXPECT_TRUE(failed.done());
      EXPECT_NE(failed.error(), nullptr);
      told.count_down();
    });
    EXPECT_THROW(sum.wait(), Error);
    told.wait();
    over.count_down();
    EXPECT_THROW(sum.result(), Error) << "the operation's";
    ASSERT_NE(sum.error(), nullptr);
    try {
      std::rethrow_exception(sum.error());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
    }
    int n_called = 0;
    sum.on_done(
        [&](const functional::AsyncTensor& failed) { n_called += failed.error() != nullptr ? 1 : 0; });
    EXPECT_EQ(n_called, 1) << "at once";
  });
}

TEST(Functional, GivesUndefinedTensorsToThoseWhoAreNoMembers) {
  world(2, [](int rank) {
    const functional::Options others{.group = new_group({1})};
    if (rank == 1) return;
    const auto x = input(rank, 3);
    for (const auto& result :
         {functional::broadcast(x, 1, others), functional::all_reduce(x, {.group = others.group}),
          functional::all_gather_tensor(x, 0, others),
          functional::reduce_scatter_tensor(x, 0, {.group = others.group}),
          functional::all_to_all_single(x, {.group = others.group})}) {
      EXPECT_TRUE(result.done());
      EXPECT_FALSE(result.wait().defined());
    }
    for (const auto& results :
         {functional::all_reduce_coalesced({x, x}, {.group = others.group}),
          functional::all_gather_into_tensor_coalesced({x, x}, others),
          functional::reduce_scatter_tensor_coalesced({x, x}, {0, 0}, {.group = others.group})}) {
      ASSERT_EQ(results.size(), 2u);
      for (const auto& result : results) EXPECT_FALSE(result.wait().defined());
    }
    const std::function<void()> recorded[] = {
        [&] { functional::all_gather_tensor_autograd(x, 0, others); },
        [&] { functional::reduce_scatter_tensor_autograd(x, 0, {.group = others.group}); },
        [&] { functional::all_to_all_single_autograd(x, {.group = others.group}); }};
    for (const auto& call : recorded) {
      try {
        call();
        ADD_FAILURE() << "nothing was raised";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUsage);
        EXPECT_NE(std::string(error.what()).find("not a member"), std::string::npos) << error.what();
      }
    }
  });
}

TEST(Functional, RaisesErrorsOfArgumentsAtOnce) {
  world(2, [](int rank) {
    const auto words = [](const std::function<void()>& fn) -> std::string {
      try {
        fn();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUsage);
        return error.what();
      }
      return "nothing was raised";
    };
    EXPECT_NE(
        words([&] { functional::reduce_scatter_tensor(input(rank, 3)); }).find("does not divide by 2 ranks"),
        std::string::npos);
    EXPECT_NE(words([&] { functional::all_gather_tensor(input(rank), 2); }).find("there is no dimension 2"),
              std::string::npos);
    EXPECT_NE(words([&] { functional::all_reduce({}); }).find("undefined"), std::string::npos);
    EXPECT_NE(words([&] { functional::broadcast(input(rank), 5); }).find("5"), std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
