// The public calls: making DTensors, moving them, their gradients, and what is refused.
#include "lockstep/dtensor/dtensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/internal/result_pool.h"
#include "lockstep/dtensor/random.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::refused;
using testing::world;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().reshape(sizes);
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "") {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6)) << what << " got\n"
                                                          << actual << "\nexpected\n"
                                                          << expected;
}

const std::vector<Placements> kLayouts1{{Replicate()}, {Shard(0)}, {Shard(1)}};

TEST(DTensor, DistributesGathersAndMovesWhatItWasGiven) {
  for (const int n : {1, 2, 3}) {
    world(n, [&](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      for (const auto& sizes : {std::vector<std::int64_t>{4, 6}, {5, 7}, {1, 2}, {0, 3}, {67, 251}}) {
        const auto whole = numbers(sizes);
        for (const auto& from : kLayouts1) {
          const auto x = distribute_tensor(whole, mesh, from);
          EXPECT_TRUE(is_dtensor(x));
          EXPECT_EQ(x.sizes(), whole.sizes());
          EXPECT_EQ(placements(x), from);
          expect_same(full_tensor(x), whole, describe(x));
          for (const auto& to : kLayouts1) {
            const auto y = redistribute(x, to);
            expect_same(full_tensor(y), whole, describe(y));
            expect_same(to_local(y), to_local(distribute_tensor(whole, mesh, to, {.src_data_rank = {}})),
                        describe(y));
          }
        }
      }
    });
  }
}

TEST(DTensor, MovesOnTwoDimensionsBetweenAllLayouts) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const auto whole = numbers({5, 6});
    const Placements kinds{Replicate(), Shard(0), Shard(1)};
    for (const auto& a : kinds) {
      for (const auto& b : kinds) {
        const auto x = distribute_tensor(whole, mesh, {a, b});
        for (const auto& c : kinds) {
          for (const auto& d : kinds) {
            const auto y = redistribute(x, {c, d});
            expect_same(full_tensor(y), whole, describe(x) + " -> " + describe(y));
            expect_same(to_local(y), to_local(distribute_tensor(whole, mesh, {c, d}, {.src_data_rank = {}})));
          }
        }
      }
    }
  });
}

TEST(DTensor, PartialsAreReducedByTheirOperation) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto mine = numbers({5, 4}) * (rank + 1);
    std::vector<at::Tensor> all;
    for (int r = 0; r < 3; ++r) all.push_back(numbers({5, 4}) * (r + 1));
    const auto stacked = at::stack(all);
    const std::vector<std::pair<ReduceOp::Kind, at::Tensor>> cases{{ReduceOp::kSum, stacked.sum(0)},
                                                                   {ReduceOp::kAvg, stacked.mean(0)},
                                                                   {ReduceOp::kMax, stacked.amax(0)},
                                                                   {ReduceOp::kMin, stacked.amin(0)},
                                                                   {ReduceOp::kProduct, stacked.prod(0)}};
    for (const auto& [op, expected] : cases) {
      const auto x = from_local(mine, mesh, {Partial(op)});
      EXPECT_EQ(x.sizes(), mine.sizes());
      expect_same(full_tensor(x), expected, describe(x));
      expect_same(full_tensor(redistribute(x, {Shard(0)})), expected, describe(x));
      expect_same(full_tensor(redistribute(x, {Shard(1)})), expected, describe(x));
    }
  });
}

TEST(DTensor, GradientsOfLocalsAreTheirPieces) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto weight = numbers({4, 4});
    for (const auto& layout : {Placements{Shard(0)}, {Shard(1)}, {Replicate()}}) {
      auto local = to_local(distribute_tensor(numbers({4, 4}) + 1, mesh, layout)).clone().requires_grad_();
      const auto x = from_local(local, mesh, layout);
      const auto y = redistribute(x, {Shard(0)}) * distribute_tensor(weight, mesh, {Replicate()});
      full_tensor(y.sum()).backward();
      expect_same(local.grad(), to_local(distribute_tensor(weight, mesh, layout)), describe(x));
    }
    // Of a partial tensor: the whole gradient on every rank.
    auto part = (numbers({4, 4}) * (rank + 1)).requires_grad_();
    const auto sum = full_tensor(from_local(part, mesh, {Partial()}));
    (sum * weight).sum().backward();
    expect_same(part.grad(), weight, "partial");
  });
}

TEST(DTensor, ALinearLayerOnShardsIsThatOfOneProcess) {
  const Placements kinds{Replicate(), Shard(0), Shard(1)};
  world(2, [&](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x0 = numbers({6, 4}).requires_grad_();
    const auto w0 = (numbers({5, 4}) * 2).requires_grad_();
    const auto b0 = numbers({5}).requires_grad_();
    const auto loss0 = at::linear(x0, w0, b0).relu().pow(2).mean();
    loss0.backward();
    for (const auto& xp : kinds) {
      for (const auto& wp : kinds) {
        const auto x = distribute_tensor(x0.detach().requires_grad_(), mesh, {xp});
        const auto w = distribute_tensor(w0.detach().requires_grad_(), mesh, {wp});
        const auto b =
            distribute_tensor(b0.detach().requires_grad_(), mesh, {wp.is_shard(0) ? wp : Placement()});
        ASSERT_TRUE(x.requires_grad() && x.is_leaf());
        const auto loss = at::linear(x, w, b).relu().pow(2).mean();
        expect_same(full_tensor(loss), loss0.detach(), "loss");
        loss.backward();
        expect_same(full_tensor(x.grad()), x0.grad(), "x " + describe(x.grad()));
        expect_same(full_tensor(w.grad()), w0.grad(), "w " + describe(w.grad()));
        expect_same(full_tensor(b.grad()), b0.grad(), "b " + describe(b.grad()));
      }
    }
  });
}

TEST(DTensor, AViewThatMergesAShardedDimensionNeedsNoCommunication) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = numbers({3, 4, 5});
    const auto x = distribute_tensor(whole, mesh, {Shard(1)});
    const auto flat = x.view({12, 5});
    EXPECT_EQ(placements(flat), (Placements{Shard(0, 3)}));
    expect_same(full_tensor(flat), whole.view({12, 5}));
    const auto back = (flat * 2).view({3, 4, 5});
    EXPECT_EQ(placements(back), Placements{Shard(1)});
    expect_same(full_tensor(back), whole * 2);
  });
}

TEST(DTensor, RandomNumbersAreThoseOfOneProcess) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    auto plain = at::make_generator<at::CPUGeneratorImpl>(17);
    const auto expected = at::zeros({5, 4}).normal_(0, 1, plain);
    for (const auto& layout : kLayouts1) {
      auto x = distribute_tensor(at::zeros({5, 4}), mesh, layout);
      manual_seed(17, mesh);
      x.normal_();
      expect_same(full_tensor(x), expected, describe(x));
    }
  });
}

TEST(DTensor, RefusesWhatCannotBeBeforeAnythingIsSent) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto other = init_device_mesh("cpu", {2, 1}, {.mesh_dim_names = {"a", "b"}});
    const auto x = distribute_tensor(numbers({4, 4}), mesh, {Shard(0)});
    refused([&] { x.add(numbers({4, 4})); }, "a plain tensor of 2 dimensions beside a sharded one");
    refused([&] { numbers({4, 4}).add_(x); }, "plain");
    refused([&] { x.add(distribute_tensor(numbers({4, 4}), other, {Shard(0), Replicate()})); }, "two meshes");
    refused([&] { distribute_tensor(numbers({4}), mesh, {Shard(0), Shard(0)}); }, "one per mesh dimension");
    refused([&] { distribute_tensor(numbers({4}), mesh, {Shard(1)}); }, "1 dimensions");
    refused([&] { distribute_tensor(numbers({4}), mesh, {Partial()}); }, "not by redistribution");
    refused([&] { redistribute(x, {Partial()}); }, "not by redistribution");
    refused([&] { redistribute(x, {}); }, "placements are required");
    refused([&] { distribute_tensor(x, mesh, {Shard(1)}); }, "distributed already");
    refused([&] { from_local(numbers({2}), mesh, {Shard(0)}, {.shape = {{4}}}); }, "together");
    refused([&] { full_tensor(numbers({2})); }, "not a DTensor");
    refused([&] { at::bernoulli(x.sigmoid()); }, "manual_seed(seed, mesh)");
    auto row = x.select(0, 1);
    refused([&] { row.add_(1); }, "view whose base was redistributed");
    EXPECT_TRUE(distribute_tensor(x, mesh, {Shard(0)}).is_same(x));
    const ImplicitReplicationScope allowed;
    expect_same(full_tensor(x.add(numbers({4, 4}))), numbers({4, 4}) * 2);
  });
}

TEST(DTensor, PartialsOfBitsAreReducedByTheirOperation) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    const auto bits = [](int r) { return (at::arange(4, at::kLong) + r) * (r + 1); };
    const auto mine = bits(rank);
    const auto check = [&](ReduceOp::Kind op, const at::Tensor& expected) {
      EXPECT_TRUE(full_tensor(from_local(mine, mesh, {Partial(op)})).equal(expected));
    };
    check(ReduceOp::kBand, bits(0).bitwise_and(bits(1)).bitwise_and(bits(2)));
    check(ReduceOp::kBor, bits(0).bitwise_or(bits(1)).bitwise_or(bits(2)));
    check(ReduceOp::kBxor, bits(0).bitwise_xor(bits(1)).bitwise_xor(bits(2)));
  });
}

TEST(DTensor, TwoOperationsCannotBePartialTogether) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 1});
    refused(
        [&] {
          from_local(numbers({4}), mesh, {Partial(), Partial(ReduceOp::kMax)});
        },
        "partial with two operations");
  });
}

TEST(DTensor, InterleavedShardsAreSentAsTheyAreCut) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = at::arange(24, at::kFloat).reshape({8, 3});
    const auto given = rank == 0 ? whole : at::zeros({8, 3});  // the values are the first rank's
    const auto x = distribute_tensor(given, mesh, {Shard(0, 2)});
    const auto rows =
        rank == 0 ? std::vector<std::int64_t>{0, 1, 4, 5} : std::vector<std::int64_t>{2, 3, 6, 7};
    EXPECT_TRUE(at::equal(to_local(x), whole.index_select(0, at::tensor(rows))));
    EXPECT_TRUE(at::equal(full_tensor(x), whole));
  });
}

TEST(DTensor, ValuesComeFromTheFirstRankUnlessToldOtherwise) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto mine = numbers({4, 4}) + rank;
    for (const auto& layout : kLayouts1) {
      expect_same(full_tensor(distribute_tensor(mine, mesh, layout)), numbers({4, 4}), "rank 0");
      expect_same(full_tensor(distribute_tensor(mine, mesh, layout, {.src_data_rank = 1})),
                  numbers({4, 4}) + 1, "rank 1");
    }
    const auto own = distribute_tensor(mine, mesh, {Shard(0)}, {.src_data_rank = {}});
    expect_same(to_local(own), mine.narrow(0, rank * 2, 2), "own");
  });
}

TEST(DTensor, ChecksLocalsWhenAsked) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto replica = from_local(numbers({3}) + rank, mesh, {Replicate()}, {.run_check = true});
    expect_same(to_local(replica), numbers({3}), "the first rank's");
    refused([&] { from_local(numbers({3 + rank}), mesh, {Shard(0)}, {.run_check = true}); },
            "differ in type or sizes");
    const auto whole = numbers({5, 2});
    const auto uneven = from_local(whole.narrow(0, rank * 3, rank == 0 ? 3 : 2).clone(), mesh, {Shard(0)},
                                   {.shape = {{5, 2}}, .stride = {{2, 1}}});
    expect_same(full_tensor(uneven), whole, "uneven");
  });
}

// Along the first mesh dimension ranks 0 and 2 see nothing wrong: they must not wait for 1 and 3 along the
// second.
TEST(DTensor, AllRanksOfAMeshRaiseWhenOneLocalTensorDiffers) {
  world(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    const auto local = numbers({rank == 3 ? 5 : 4});
    const auto failure = testing::caught([&] {
      from_local(local, mesh, {Shard(0), Replicate()}, {.run_check = true});
    });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
    EXPECT_TRUE(testing::says(failure, "differ in type or sizes")) << failure.message;
    EXPECT_TRUE(testing::says(failure, rank == 3 ? "[0, 0]" : "[1, 1]")) << failure.message;
  });
}

TEST(DTensor, LocalGradientsMayBeGivenAnotherMeaning) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = distribute_tensor(numbers({4}), mesh, {Replicate()}).requires_grad_();
    // Each rank uses half: its gradient is a part of the sum.
    (to_local(x, {.grad_placements = Placements{Partial()}}).narrow(0, rank * 2, 2) * 3).sum().backward();
    expect_same(full_tensor(x.grad()), at::full({4}, 3.0), "partial");
  });
}

TEST(DTensor, RedistributesWithoutWaitingAndInOtherTypes) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = numbers({64, 64});
    const auto x = distribute_tensor(whole, mesh, {Shard(0)});
    std::vector<at::Tensor> pending;
    for (int i = 0; i < 4; ++i)
      pending.push_back(redistribute(x * (i + 1), {Replicate()}, {.async_op = true}));
    for (int i = 0; i < 4; ++i)
      expect_same(to_local(pending[static_cast<std::size_t>(i)] + 1), whole * (i + 1) + 1, "async");
    const auto y = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_();
    const auto half =
        redistribute(y, {Replicate()}, {.forward_dtype = at::kBFloat16, .backward_dtype = at::kDouble});
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    expect_same(to_local(half.detach()), whole.to(at::kBFloat16), "bfloat16");
    half.to(at::kFloat).sum().backward();
    EXPECT_EQ(y.grad().scalar_type(), at::kFloat);
    expect_same(full_tensor(y.grad()), at::ones({64, 64}), "gradient");
  });
}

TEST(DTensor, WorksInThreeDimensions) {
  world(8, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2});
    const auto whole = numbers({5, 6, 3});
    const auto x = distribute_tensor(whole, mesh, {Shard(0), Shard(0), Shard(1)}, {.src_data_rank = {}});
    expect_same(full_tensor(x), whole, describe(x));
    const auto y = redistribute(x.relu(), {Shard(2), Replicate(), Shard(0)});
    expect_same(full_tensor(y), whole.relu(), describe(y));
    expect_same(full_tensor(x.sum(0)), whole.sum(0), "sum");
  });
}

TEST(DTensor, CrossEntropyOverShardedClassesGathersNoClasses) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto logits = numbers({6, 7}).requires_grad_();
    const auto targets = (at::arange(6, at::kLong) * 5).remainder(7);
    const auto loss = at::cross_entropy_loss(logits, targets);
    loss.backward();
    const auto x = distribute_tensor(logits.detach(), mesh, {Shard(1)}).requires_grad_();
    const auto y = distribute_tensor(targets, mesh);
    const CommDebugScope scope;
    const auto sharded = at::cross_entropy_loss(x, y);
    EXPECT_EQ(placements(sharded), Placements{Replicate()});
    sharded.backward();
    EXPECT_EQ(placements(x.grad()), Placements{Shard(1)});
    EXPECT_EQ(scope.count(OpType::kAllGather) + scope.count(OpType::kAllGatherIntoTensor), 0)
        << scope.describe();
    expect_same(to_local(sharded), loss.detach(), "loss");
    expect_same(full_tensor(x.grad()), logits.grad(), "gradient");
  });
}

TEST(DTensor, HasNoMemoryOfItsOwn) {
  world(2, [](int) {
    const auto x = distribute_tensor(numbers({4}), init_device_mesh("cpu", {2}), {Shard(0)});
    EXPECT_THROW(x.data_ptr<float>(), c10::Error);
    EXPECT_EQ(describe(x), "DTensor Float [4] on mesh cpu [2], [Shard(0)], local [2]");
  });
}

TEST(ResultPool, HoldsLargeShardsHoweverTheyAreMade) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = numbers({1024, 512});
    const auto keep = distribute_tensor(whole, mesh, {Shard(0)});  // a mesh keeps memory while it has tensors
    auto* const where = to_local(distribute_tensor(whole, mesh, {Shard(0)})).data_ptr();
    EXPECT_EQ(to_local(distribute_tensor(whole, mesh, {Shard(1)})).data_ptr(), where);
    EXPECT_EQ(to_local(distribute_tensor(whole, mesh, {Shard(0)}, {.src_data_rank = {}})).data_ptr(), where);
    EXPECT_EQ(to_local(redistribute(keep, {Shard(1)})).data_ptr(), where);
    EXPECT_EQ(to_local(dtensor::empty({1024, 512}, mesh, {Shard(0)})).data_ptr(), where);
    expect_same(full_tensor(keep), whole);
  });
}

TEST(ResultPool, UsesAFreedResultAgain) {
  world(2, [](int) {
    const auto group = default_group();
    at::Tensor last;
    {
      const dtensor_internal::ResultPool pool;
      auto a = pool.empty({1024, 256}, at::kFloat, group);
      const auto b = pool.empty({1024, 256}, at::kFloat, group);
      auto* const where = a.data_ptr();
      EXPECT_NE(where, b.data_ptr());
      a = at::Tensor();
      EXPECT_NE(pool.empty({1024, 128}, at::kFloat, group).data_ptr(), where);
      last = pool.empty({512, 256}, at::kDouble, group);  // as many bytes
      EXPECT_EQ(last.data_ptr(), where);
    }
    last.fill_(1);  // longer than the pool
    EXPECT_EQ(last.sum().item<double>(), 512 * 256);
  });
}

}  // namespace
}  // namespace lockstep
