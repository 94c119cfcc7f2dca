// Meshes of three dimensions: eight ranks, pieces of different sizes and empty ones.
#include <gtest/gtest.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

// The i-th of the 27 ways to place a matrix on three mesh dimensions.
Placements layout_of(int i) {
  const Placements kinds{Replicate(), Shard(0), Shard(1)};
  return {kinds[static_cast<std::size_t>(i % 3)], kinds[static_cast<std::size_t>(i / 3 % 3)],
          kinds[static_cast<std::size_t>(i / 9 % 3)]};
}

TEST(ThreeDimensions, EveryLayoutIsDistributedAndReachedFromAnother) {
  world(8, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"pp", "dp", "tp"}});
    for (const auto& sizes : {std::vector<std::int64_t>{5, 6}, {3, 1}, {9, 2}}) {
      const auto whole = waves(sizes);
      for (int i = 0; i < 27; ++i) {
        const auto x = distribute_tensor(whole, mesh, layout_of(i));
        expect_whole(x, whole, describe(x));
        const auto to = layout_of(i * 10 + 4);  // every layout once
        const auto y = redistribute(x, to);
        const auto what = describe(x) + " -> " + describe(y);
        expect_whole(to_local(y), to_local(distribute_tensor(whole, mesh, to, {.src_data_rank = {}})), what);
        expect_whole(y, whole, what);
      }
    }
  });
}

TEST(ThreeDimensions, AChainOfProductsIsThatOfOneProcess) {
  world(8, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2});
    // [5, 6]: over four or eight ranks pieces differ. [1, 3]: most are empty.
    for (const auto& n : {std::vector<std::int64_t>{5, 6, 7, 3}, {1, 3, 2, 5}}) {
      std::vector<at::Tensor> one;
      for (std::size_t i = 0; i < 3; ++i) one.push_back(waves({n[i], n[i + 1]}, double(i)).requires_grad_());
      const auto chain = [](const std::vector<at::Tensor>& m) { return m[0].mm(m[1]).tanh().mm(m[2]); };
      const auto expected = chain(one);
      expected.pow(2).sum().backward();
      for (int i = 0; i < 27; ++i) {
        const int layouts[] = {i, i * 5 + 3, i * 11 + 7};
        std::vector<at::Tensor> many;
        std::string what;
        for (std::size_t k = 0; k < 3; ++k) {
          many.push_back(
              distribute_tensor(one[k].detach(), mesh, layout_of(layouts[k]), {.src_data_rank = {}})
                  .requires_grad_());
          what += describe(many.back()) + "; ";
        }
        const auto y = chain(many);
        expect_whole(y, expected, what);
        y.pow(2).sum().backward();
        for (std::size_t k = 0; k < 3; ++k) {
          expect_whole(many[k].grad(), one[k].grad(), base::cat(what, "gradient ", k));
        }
      }
    }
  });
}

TEST(ThreeDimensions, ReductionsViewsAndLossesAreThoseOfOneProcess) {
  world(8, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2});
    const auto whole = waves({4, 6}).requires_grad_();
    const auto targets = (at::arange(4, at::kLong) * 5).remainder(6);
    const auto run = [](const at::Tensor& x, const at::Tensor& t) {
      return at::cross_entropy_loss(x.view({2, 2, 6}).transpose(0, 1).reshape({4, 6}), t) +
             x.softmax(0).pow(2).mean();
    };
    const auto loss = run(whole, targets);
    loss.backward();
    for (int i = 0; i < 27; ++i) {
      const auto x =
          distribute_tensor(whole.detach(), mesh, layout_of(i), {.src_data_rank = {}}).requires_grad_();
      const auto sharded = run(x, distribute_tensor(targets, mesh, {}, {.src_data_rank = {}}));
      expect_whole(sharded, loss, describe(x));
      sharded.backward();
      expect_whole(x.grad(), whole.grad(), describe(x) + " gradient");
    }
  });
}

// Formulas of libtorch ask for strides, and the pieces of one row or none have any.
TEST(UnevenPieces, LeaveAllRanksWithTheSameStrides) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto whole = waves({5, 4});
    for (const auto& layout : {Placements{Shard(0)}, Placements{Shard(1)}}) {
      const auto x = distribute_tensor(whole, mesh, layout);
      const auto expect = [&](const at::Tensor& actual, const at::Tensor& expected, const char* what) {
        EXPECT_EQ(actual.strides(), expected.strides())
            << what << " rank " << rank << " " << describe(actual);
        expect_whole(actual, expected, what);
      };
      expect(x.t(), whole.t(), "t");
      expect(x.t().tanh(), whole.t().tanh(), "tanh");
      expect(x.t().clone(), whole.t().clone(), "clone");
      expect(x.unsqueeze(1).permute({2, 0, 1}), whole.unsqueeze(1).permute({2, 0, 1}), "permute");
      expect(x.t() * x.t(), whole.t() * whole.t(), "mul");
      expect(x.mm(x.t()), whole.mm(whole.t()), "mm");
      expect(redistribute(x.t(), placements(x.t())), whole.t(), "redistribute");
      expect(x.sum(0).expand({5, 4}), whole.sum(0).expand({5, 4}), "expand");
    }
  });
}

}  // namespace
}  // namespace lockstep
