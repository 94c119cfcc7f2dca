// Operators without a rule, and what is refused: right results, said once, nothing sent before an error.
#include <gtest/gtest.h>

#include <limits>
#include <mutex>

#include "lockstep/base/log.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

const std::vector<Placements> kLayouts{{Replicate()}, {Shard(0)}, {Shard(1)}};

std::mutex lines_mutex;
std::vector<std::string> lines;

TEST(DefaultRule, ReplicatesTheInputsAndIsSaidOncePerOperator) {
  set_log_level(LogLevel::kDebug);
  set_log_sink([](LogLevel level, std::string_view text) {
    const std::lock_guard lock(lines_mutex);
    if (level == LogLevel::kDebug && text.find("has no rule") != std::string_view::npos)
      lines.emplace_back(text);
  });
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    for (const auto& sizes : {std::vector<std::int64_t>{5, 4}, {3, 3}}) {
      const auto whole = waves(sizes);
      for (const auto& layout : kLayouts) {
        const auto y = at::renorm(distribute_tensor(whole, mesh, layout), 2, 0, 1.0);
        EXPECT_EQ(placements(y), Placements{Replicate()});
        expect_whole(y, at::renorm(whole, 2, 0, 1.0), "renorm");
      }
    }
  });
  set_log_sink(nullptr);
  set_log_level_from_env();
  // Two ranks, two sizes, three layouts: one line.
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0], "dtensor: aten::renorm has no rule: its inputs are replicated");
}

TEST(DefaultRule, OperatorsInPlaceStoreEachRanksPiece) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto whole = waves({5, 4});
    for (const auto& layout : kLayouts) {
      auto x = distribute_tensor(whole, mesh, layout);
      const auto local = to_local(x);
      x.renorm_(2, 0, 1.0);
      expect_whole(x, whole.clone().renorm_(2, 0, 1.0), "renorm_");
      EXPECT_EQ(placements(x), layout);
      EXPECT_TRUE(to_local(x).is_alias_of(local)) << "the piece was replaced";
    }
    auto part = from_local(whole * (rank + 1), mesh, {Partial()});
    part.renorm_(2, 0, 1.0);
    expect_whole(part, (whole * 6).renorm_(2, 0, 1.0), "partial");
  });
}

// What a gradient scaler calls: it writes to a list and to a tensor, and nothing returns both instead.
TEST(DefaultRule, OperatorsInPlaceOnListsStoreEachRanksPieces) {
  world(3, [](int) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto half = distribute_tensor(at::full({1}, 0.5), mesh);
    for (const auto& layout : kLayouts) {
      for (const bool broken : {false, true}) {
        auto whole = waves({5, 4});
        if (broken) whole[4][3] = std::numeric_limits<float>::infinity();  // on one rank's piece
        const std::vector<at::Tensor> many{distribute_tensor(whole, mesh, layout),
                                           distribute_tensor(waves({4, 3}), mesh, layout)};
        auto found = distribute_tensor(at::zeros({1}), mesh);
        at::_amp_foreach_non_finite_check_and_unscale_(many, found, half);
        expect_whole(found, at::full({1}, broken ? 1.0 : 0.0), "found");
        expect_whole(many[0], whole * 0.5, "first");
        expect_whole(many[1], waves({4, 3}) * 0.5, "second");
        EXPECT_EQ(placements(many[0]), layout);
      }
    }
  });
}

TEST(DefaultRule, RefusesViewsOfPieces) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = waves({4, 4});
    const auto replica = distribute_tensor(whole, mesh);
    expect_whole(at::_test_autograd_multiple_dispatch_view(replica), whole.view(-1), "view");
    const auto x = distribute_tensor(whole, mesh, {Shard(0)});
    const CommDebugScope scope;
    testing::refused([&] { at::_test_autograd_multiple_dispatch_view(x); },
                     "aten::_test_autograd_multiple_dispatch_view([Shard(0)] [4, 4]): no rule says how the "
                     "result shares memory with the pieces. Redistribute the tensor to Replicate() first");
    EXPECT_EQ(scope.describe(), "none");
  });
}

TEST(DefaultRule, ErrorsNameOperatorPlacementsAndTheWayOutBeforeAnythingIsSent) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = distribute_tensor(waves({4, 4}), mesh, {Shard(0)});
    const auto partial = from_local(waves({4, 4}), mesh, {Partial()});
    const auto state = at::zeros_like(x);
    const auto more = at::zeros_like(x);
    const auto step = at::scalar_tensor(1.0f);
    const auto refused = [](const std::function<void()>& fn, const std::vector<std::string>& parts) {
      const CommDebugScope scope;
      for (const auto& part : parts) testing::refused(fn, part);
      EXPECT_EQ(scope.describe(), "none") << parts[0];
    };
    refused(
        [&] {
          x.as_strided({2, 2}, {4, 1});
        },
        {"aten::as_strided([Shard(0)] [4, 4])", "Say it with view, transpose, slice or expand"});
    refused([&] { x.resize_({8, 4}); }, {"aten::resize_([Shard(0)] [4, 4])", "use to_local()"});
    refused(
        [&] {
          at::_fused_adam_({x}, {partial}, {state}, {more}, {}, {step}, 0.1, 0.9, 0.99, 0, 1e-8, false,
                           false);
        },
        {"aten::_fused_adam_: grads[0] is [Partial(sum)] [4, 4], self[0] is [Shard(0)] [4, 4]",
         "Redistribute the gradient to the placements of its parameter first"});
    refused(
        [&] {
          x.mul(waves({4, 4}));
        },
        {"aten::mul.Tensor([Shard(0)] [4, 4], plain [4, 4])",
         "Distribute it (distribute_tensor, from_local)"});
    const auto other =
        distribute_tensor(waves({4, 4}), init_device_mesh("cpu", {2, 1}), {Shard(0), Replicate()});
    refused([&] { x.mm(other); },
            {"aten::mm([Shard(0)] [4, 4], ", "tensors on two meshes", "take full_tensor() of one"});
  });
}

}  // namespace
}  // namespace lockstep
