// Layers and indexing on sharded tensors: what they send, and that every placement gives the result of one
// process, also where the operator has to move or to copy first.
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <functional>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

at::Tensor lookups() {
  return (at::arange(12, at::kLong) * 5 + 3).remainder(7).reshape({4, 3});
}

struct Lookup {
  std::int64_t padding = -1;
  bool by_frequency = false;
};
const std::vector<Lookup> kLookups{
    {}, {.padding = 3}, {.by_frequency = true}, {.padding = 1, .by_frequency = true}};

void expect_same_lookup(const DeviceMesh& mesh, const Placements& table, const Placements& indices) {
  for (const auto& lookup : kLookups) {
    const auto what = base::cat(to_string(table), " by ", to_string(indices), " padding ", lookup.padding,
                                lookup.by_frequency ? " by frequency" : "");
    const auto one = waves({7, 4}).requires_grad_();
    const auto plain = at::embedding(one, lookups(), lookup.padding, lookup.by_frequency);
    plain.pow(2).sum().backward();
    const auto many = distribute_tensor(one.detach(), mesh, table).requires_grad_();
    const auto found =
        at::embedding(many, distribute_tensor(lookups(), mesh, indices), lookup.padding, lookup.by_frequency);
    expect_whole(found, plain, what);
    found.pow(2).sum().backward();
    expect_whole(many.grad(), one.grad(), what + " gradient");
    for (std::size_t m = 0; m < table.size(); ++m) {
      if (!table[m].is_shard(0)) continue;
      EXPECT_EQ(placements(many.grad())[m], table[m]) << what;
    }
  }
}

TEST(Layers, LookupsInAShardedTableAreThoseOfOneProcess) {
  for (const int n : {2, 3}) {
    world(n, [n](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      for (const Placement& table : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
        for (const Placement& indices : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
          expect_same_lookup(mesh, {table}, {indices});
        }
      }
    });
  }
}

TEST(Layers, LookupsInATableOnTwoDimensionsAreThoseOfOneProcess) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const Placements kinds{Replicate(), Shard(0), Shard(1)};
    for (const auto& a : kinds) {
      for (const auto& b : kinds) {
        expect_same_lookup(mesh, {a, b}, {Replicate(), Replicate()});
        expect_same_lookup(mesh, {a, b}, {Shard(0), Replicate()});
      }
    }
  });
}

TEST(Layers, TheGradientOfAShardedTableIsComputedForOwnRowsAndSendsNothing) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto table = distribute_tensor(waves({7, 4}), mesh, {Shard(0)}).requires_grad_();
    const auto y = redistribute(at::embedding(table, distribute_tensor(lookups(), mesh)), {Replicate()});
    const CommDebugScope scope;
    y.sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    const auto gradient = to_local(table.grad());
    const auto rows = rank == 0 ? 4 : 3;
    EXPECT_EQ(gradient.size(0), rows);
    // And one row for lookups of other ranks' rows.
    EXPECT_LE(gradient.storage().nbytes(), static_cast<std::size_t>((rows + 1) * 4) * sizeof(float));
  });
}

TEST(Layers, TheGradientOfAShardedTableCanBeDifferentiated) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto twice = [](const at::Tensor& table, const at::Tensor& indices) {
      const auto loss = at::embedding(table, indices).pow(3).sum();
      const auto slope = torch::autograd::grad({loss}, {table}, {}, true, true)[0];
      slope.pow(2).sum().backward();
      return table.grad();
    };
    const auto one = waves({7, 4}).requires_grad_();
    const auto many = distribute_tensor(one.detach(), mesh, {Shard(0)}).requires_grad_();
    expect_whole(twice(many, distribute_tensor(lookups(), mesh)), twice(one, lookups()), "second gradient");
  });
}

TEST(Layers, AConvolutionOfABatchSendsNothing) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = waves({5, 3, 6, 6}).requires_grad_();
    const auto w = waves({4, 3, 3, 3}, 1).requires_grad_();
    const auto b = waves({4}, 2).requires_grad_();
    const auto y = at::conv2d(x, w, b, 1, 1);
    y.pow(2).sum().backward();
    const auto xs = distribute_tensor(x.detach(), mesh, {Shard(0)}).requires_grad_();
    const auto ws = distribute_tensor(w.detach(), mesh).requires_grad_();
    const auto bs = distribute_tensor(b.detach(), mesh).requires_grad_();
    const CommDebugScope scope;
    const auto ys = at::conv2d(xs, ws, bs, 1, 1);
    ys.pow(2).sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    EXPECT_EQ(placements(ys), Placements{Shard(0)});
    EXPECT_EQ(placements(xs.grad()), Placements{Shard(0)});
    EXPECT_EQ(placements(ws.grad()), Placements{Partial()});
    expect_whole(ys, y, "result");
    expect_whole(xs.grad(), x.grad(), "input");
    expect_whole(ws.grad(), w.grad(), "weight");
    expect_whole(bs.grad(), b.grad(), "bias");
  });
}

TEST(Layers, AttentionOverHeadsSendsNothingAndIsThatOfOneProcess) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    for (const bool causal : {false, true}) {
      std::vector<at::Tensor> one, many;
      for (int i = 0; i < 3; ++i) {
        one.push_back(waves({2, 4, 6, 8}, i).requires_grad_());
        many.push_back(distribute_tensor(one.back().detach(), mesh, {Shard(1)}).requires_grad_());
      }
      const auto y = at::scaled_dot_product_attention(one[0], one[1], one[2], {}, 0.0, causal);
      y.pow(2).sum().backward();
      at::Tensor ys;
      {
        const CommDebugScope scope;
        ys = at::scaled_dot_product_attention(many[0], many[1], many[2], {}, 0.0, causal);
        EXPECT_EQ(scope.describe(), "none");
      }
      EXPECT_EQ(placements(ys), Placements{Shard(1)});
      {
        const CommDebugScope scope;
        ys.pow(2).sum().backward();
        EXPECT_EQ(scope.describe(), "none");
      }
      expect_whole(ys, y, "result");
      for (std::size_t i = 0; i < 3; ++i)
        expect_whole(many[i].grad(), one[i].grad(), base::cat("gradient ", i));
    }
  });
}

TEST(Layers, RmsNormOfASequenceSendsNothing) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = waves({3, 5, 6}).requires_grad_();
    const auto w = waves({6}, 1).requires_grad_();
    const auto y = at::rms_norm(x, {6}, w, 1e-5);
    y.pow(3).sum().backward();
    const auto xs = distribute_tensor(x.detach(), mesh, {Shard(1)}).requires_grad_();
    const auto ws = distribute_tensor(w.detach(), mesh).requires_grad_();
    const CommDebugScope scope;
    const auto ys = at::rms_norm(xs, {6}, ws, 1e-5);
    ys.pow(3).sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    EXPECT_EQ(placements(ys), Placements{Shard(1)});
    expect_whole(ys, y, "result");
    expect_whole(xs.grad(), x.grad(), "input");
    expect_whole(ws.grad(), w.grad(), "weight");
  });
}

// The gradient of a view is a view of the gradient, which others still need: the engine must not add into it.
TEST(Layers, GradientsThatShareMemoryAreNotAddedInto) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto run = [](const at::Tensor& p, const at::Tensor& q, const at::Tensor& w) {
      // Backward in the opposite order: the view's gradient arrives at p first, q's is used last.
      const auto twice = q * 2;
      const auto other = p * 3;
      const auto sum = p.view({24}) + twice;
      ((sum * w).sum() + other.sum()).backward();
    };
    const auto p = waves({4, 6}).requires_grad_(), q = waves({24}, 1).requires_grad_(), w = waves({24}, 2);
    run(p, q, w);
    const auto ps = distribute_tensor(p.detach(), mesh, {Shard(0)}).requires_grad_();
    const auto qs = distribute_tensor(q.detach(), mesh, {Shard(0)}).requires_grad_();
    run(ps, qs, distribute_tensor(w, mesh, {Shard(0)}));
    expect_whole(ps.grad(), p.grad(), "of the viewed tensor");
    expect_whole(qs.grad(), q.grad(), "of the other one");
  });
}

// Along the sharded dimension too, which the rules do not admit: the tensor is moved, or written by a copy.
TEST(Layers, IndexingAlongAnyDimensionIsThatOfOneProcess) {
  using Fn = std::function<at::Tensor(at::Tensor, const std::function<at::Tensor(const at::Tensor&)>&)>;
  const auto rows = at::tensor({4, 0, 2}, at::kLong);
  const std::vector<std::pair<const char*, Fn>> cases{
      {"index_put_",
       [&](at::Tensor x, const auto& d) {
         return x.index_put_({d(rows)}, d(waves({3, 6}, 1)));
       }},
      {"index_put_ accumulate",
       [&](at::Tensor x, const auto& d) {
         return x.index_put_({std::nullopt, d(rows)}, d(waves({5, 3}, 1)), true);
       }},
      {"scatter_ 0",
       [&](at::Tensor x, const auto& d) {
         return x.scatter_(0, d(rows.unsqueeze(1).expand({3, 6}).contiguous()), d(waves({3, 6}, 1)));
       }},
      {"scatter_ 1",
       [&](at::Tensor x, const auto& d) {
         return x.scatter_(1, d(rows.expand({5, 3}).contiguous()), 2.5);
       }},
      {"scatter_add_",
       [&](at::Tensor x, const auto& d) {
         return x.scatter_add_(1, d(rows.expand({5, 3}).contiguous()), d(waves({5, 3}, 1)));
       }},
      {"cumsum 0", [](at::Tensor x, const auto&) { return x.cumsum(0); }},
      {"cumsum 1", [](at::Tensor x, const auto&) { return x.cumsum(1); }},
      {"topk 0", [](at::Tensor x, const auto&) { return std::get<0>(x.topk(2, 0)); }},
      {"topk 1", [](at::Tensor x, const auto&) { return std::get<1>(x.topk(2, 1)).to(at::kFloat); }},
      {"sort 0", [](at::Tensor x, const auto&) { return std::get<0>(x.sort(0)); }},
      {"sort 1", [](at::Tensor x, const auto&) { return std::get<1>(x.sort(1)).to(at::kFloat); }},
      {"diagonal", [](at::Tensor x, const auto&) { return x.diagonal(1).clone(); }},
      {"unfold", [](at::Tensor x, const auto&) { return x.unfold(0, 3, 2).clone(); }},
  };
  world(3, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto whole = waves({5, 6});
    for (const auto& [name, fn] : cases) {
      const auto expected = fn(whole.clone(), [](const at::Tensor& t) { return t; });
      const auto replicate = [&](const at::Tensor& t) { return distribute_tensor(t, mesh); };
      for (const Placement& layout : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
        expect_whole(fn(distribute_tensor(whole, mesh, {layout}), replicate), expected,
                     base::cat(name, " ", layout));
      }
      const auto part = from_local(whole * (rank == 1 ? 1.5 : -0.25), mesh, {Partial()});
      expect_whole(fn(part, replicate), expected, base::cat(name, " partial"));
    }
  });
}

}  // namespace
}  // namespace lockstep
