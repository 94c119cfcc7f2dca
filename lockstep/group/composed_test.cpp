// An engine that offers five collectives and calls nobody back: the others are composed of them, and futures
// resolve.
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <vector>

#include "lockstep/base/path_testing.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

void kv_world(int n, const std::function<void(int)>& fn) {
  static const std::string name = load_engine(path_testing::from_program(PLUGIN_DIR) + "/kv_engine.so");
  at::set_num_threads(1);
  run_threads(n, fn, {.timeout = kPatience, .backend = name});
}

TEST(Composed, ReduceIsAnAllReduceThatOnlyTheRootKeeps) {
  kv_world(3, [](int rank) {
    for (int dst = 0; dst < 3; ++dst) {
      auto tensor = sample(rank, {2, 3}, at::kFloat).t();
      reduce(tensor, {.dst = dst, .async_op = dst == 1}).wait();
      const auto sum = reduced([](int r) { return sample(r, {2, 3}, at::kFloat); }, 3, ReduceOp::kSum).t();
      expect_equal(tensor, rank == dst ? sum : sample(rank, {2, 3}, at::kFloat).t());
    }
  });
}

TEST(Composed, GatherScatterAndAllToAllSendEverythingToAll) {
  kv_world(3, [](int rank) {
    const auto part = [](int from, int to) { return sample(from + 2 * to, {2, 2}, at::kInt); };
    std::vector<at::Tensor> list, given, sent, came;
    for (int r = 0; r < 3; ++r) {
      if (rank == 1) list.push_back(at::empty({2, 2}, at::kInt));
      if (rank == 2) given.push_back(part(2, r));
      sent.push_back(part(rank, r));
      came.push_back(part(r, rank));
    }
    gather(part(rank, 0), list, {.dst = 1});
    for (std::size_t r = 0; r < list.size(); ++r) expect_equal(list[r], part(static_cast<int>(r), 0));
    auto mine = at::empty({2, 2}, at::kInt).t();
    scatter(mine, given, {.src = 2, .async_op = true}).wait();
    expect_equal(mine, part(2, rank));
    auto output = at::empty({2, 6}, at::kInt).t();
    all_to_all_single(output, at::cat(sent));
    expect_equal(output, at::cat(came));
    all_to_all_single(at::empty({0, 2}), at::empty({0, 2}));
  });
}

TEST(Composed, ScatterLetsComplexNumbersStandForPairs) {
  kv_world(2, [](int rank) {
    const auto value = [](int r) { return at::complex(at::full({2}, r + 1.0f), at::full({2}, r + 3.0f)); };
    const auto list = rank == 0 ? std::vector<at::Tensor>{value(0), value(1)} : std::vector<at::Tensor>{};
    auto pairs = at::empty({2, 2});
    scatter(pairs, list, {.src = 0});
    expect_equal(pairs, at::view_as_real(value(rank)));
  });
}

TEST(Composed, UnevenPartsArePaddedOrReducedOneByOne) {
  kv_world(3, [](int rank) {
    const auto part = [](int r) { return sample(r, {r + 1, 2}, at::kFloat); };
    std::vector<at::Tensor> outputs;
    for (int r = 0; r < 3; ++r) outputs.push_back(at::empty_like(part(r)));
    all_gather(outputs, part(rank), {.async_op = true}).wait();
    for (int r = 0; r < 3; ++r) expect_equal(outputs[static_cast<std::size_t>(r)], part(r));
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < 3; ++r) inputs.push_back(part(r) + rank);
    const auto kept = inputs[0].clone();
    auto output = at::empty_like(part(rank));
    reduce_scatter(output, inputs);
    expect_equal(output, part(rank) * 3 + 3);
    expect_equal(inputs[0], kept);
    auto sparse = (at::ones({2, 3}) * rank).to_sparse();
    all_reduce(sparse);
    expect_equal(sparse.to_dense(), at::full({2, 3}, 3.0f));
  });
}

TEST(Composed, WhatCannotBeIsRefusedByName) {
  kv_world(2, [](int rank) {
    const auto send_error = caught([&] { send(at::ones({1}), {.dst = 1 - rank}); });
    EXPECT_EQ(send_error.kind, ErrorKind::kUnsupported);
    EXPECT_TRUE(says(send_error, "engine kv")) << send_error.message;
    const auto parts = at::ones({2, 1}).unbind(0);
    EXPECT_EQ(caught([&] { all_to_all(at::empty({2, 1}).unbind(0), parts); }).kind, ErrorKind::kUnsupported);
    barrier();
  });
}

TEST(Composed, FuturesResolveThoughTheEngineHasNoCallbacks) {
  std::latch asked(1);
  kv_world(2, [&](int rank) {
    auto tensor = at::ones({2});
    if (rank == 1) {
      asked.wait();
      all_reduce(tensor);
      barrier();
      return;
    }
    const auto future = all_reduce(tensor, {.async_op = true}).get_future();
    EXPECT_FALSE(future->completed());
    const auto doubled = future->then(
        [](c10::ivalue::Future& done) -> c10::IValue { return done.value().toTensorVector().at(0) * 2; },
        c10::TensorType::get());
    asked.count_down();
    doubled->waitAndThrow();
    expect_equal(doubled->value().toTensor(), at::full({2}, 4.0f));
    barrier();
  });
}

}  // namespace
}  // namespace lockstep
