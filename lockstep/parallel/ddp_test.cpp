// Data parallelism over tensor parallelism: DistributedDataParallel on a module with DTensor parameters.
// Ranks 2 x 2 (dp, tp) against one process that sees both batches.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "lockstep/collective/comm_debug.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"
#include "lockstep/parallel/ddp_testing.h"

namespace lockstep {
namespace {

using namespace testing;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

struct Variant {
  const char* name;
  DdpOptions options;
  bool in_place = false;
};
std::vector<Variant> variants() {
  return {{"copied", {.in_place_bytes = SIZE_MAX}},
          {"in place", {.in_place_bytes = 1}, true},
          {"views", {.gradient_as_bucket_view = true, .in_place_bytes = SIZE_MAX}},
          {"views in place", {.gradient_as_bucket_view = true, .in_place_bytes = 1}, true},
          {"small buckets", {.bucket_cap_mb = 0.0001, .in_place_bytes = SIZE_MAX}},
          {"unused", {.find_unused_parameters = true}},
          {"static graph", {.static_graph = true}}};
}

TEST(DdpOverTensorParallel, TrainsAsOneProcessWithBothBatches) {
  const Net one = trained_alone<Adam>(AdamOptions(0.01));
  for (const auto& variant : variants()) {
    world(4, [&](int) {
      Fixture setup;
      auto options = variant.options;
      options.device_mesh = setup.mesh["dp"];
      auto model = DistributedDataParallel(setup.net, options);
      Adam optimizer(model->parameters(), AdamOptions(0.01));
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(step, setup.half))).backward();
        const auto weight = setup.net->named_parameters()["blocks.1.up.weight"];
        EXPECT_EQ(placements(weight.grad()), Placements{Shard(0)}) << variant.name;
        const CommDebugScope scope;
        optimizer.step();
        EXPECT_EQ(scope.total(), 0) << variant.name << ": " << scope.describe();
      }
      expect_same_parameters(*setup.net, *one, variant.name);
      EXPECT_EQ(model->stats().n_in_place != 0, variant.in_place) << variant.name;
      EXPECT_EQ(placements(setup.net->named_parameters()["blocks.0.down.weight"]), Placements{Shard(1)});
    });
  }
}

// The ranks of dp start from rank 0's values, whatever their own were: each from the piece of its tp rank.
TEST(DdpOverTensorParallel, BeginsWithTheFirstReplicasPieces) {
  world(4, [&](int) {
    Fixture setup;
    const Net one;
    if (setup.half == 1) {
      const c10::NoGradGuard no_grad;
      for (auto& p : setup.net->parameters()) p.mul_(3);
    }
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    expect_same_parameters(*setup.net, *one, "after wrapping");
  });
}

// A replicated weight on sequence-sharded activations gets partial sums, which are reduced over tp once, then
// averaged over dp.
TEST(DdpOverTensorParallel, PartialGradientsAreReducedOverTheirMeshFirst) {
  const Net one = trained_alone<SGD>(SGDOptions(0.1));
  const ParallelPlan sequence{
      {"",
       PrepareModuleInputOutput{
           .input = {.input_layouts = {Replicate()}, .desired_input_layouts = {Shard(0)}},
           .output = {.output_layouts = {Shard(0)}, .desired_output_layouts = {Replicate()}}}},
      {"blocks.*.norm", SequenceParallel{.sequence_dim = 0}},
      {"blocks.*.up", ColwiseParallel{.input_layouts = Shard(0)}},
      {"blocks.*.down", RowwiseParallel{.output_layouts = Shard(0), .use_local_output = false}},
  };
  for (const std::size_t in_place_bytes : {std::size_t{1}, SIZE_MAX}) {
    world(4, [&](int) {
      Fixture setup(sequence);
      auto model = DistributedDataParallel(
          setup.net, {.device_mesh = setup.mesh["dp"], .in_place_bytes = in_place_bytes});
      SGD optimizer(model->parameters(), SGDOptions(0.1));
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(step, setup.half))).backward();
        for (const auto& p : setup.net->named_parameters()) {
          if (!is_dtensor(p.value())) continue;
          EXPECT_EQ(placements(p.value().grad()), placements(p.value())) << p.key();
        }
        optimizer.step();
      }
      expect_same_parameters(*setup.net, *one, "sequence parallel");
    });
  }
}

TEST(DdpOverTensorParallel, GradientsAccumulateInsideNoSyncAndAreAveragedOnce) {
  world(4, [&](int) {
    Fixture setup;
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    Net one;
    for (const int step : {0, 1}) loss_of(one(at::cat({batch(step, 0), batch(step, 1)}))).backward();
    {
      const auto local = model->no_sync();
      loss_of(model->forward(batch(0, setup.half))).backward();
    }
    loss_of(model->forward(batch(1, setup.half))).backward();
    for (const auto& item : one->named_parameters())
      expect_close(setup.net->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
  });
}

TEST(DdpOverTensorParallel, CommunicationHooksSeeThePieces) {
  const Net one = trained_alone<SGD>(SGDOptions(0.1));
  world(4, [&](int) {
    Fixture setup;
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    const auto group = setup.mesh["dp"].get_group();
    std::int64_t n_seen = 0;
    const auto look = [&, group](GradBucket& bucket) {
      for (std::size_t i = 0; i < bucket.parameters().size(); ++i) {
        EXPECT_FALSE(is_dtensor(bucket.parameters()[i]));
        EXPECT_EQ(bucket.parameters()[i].sizes(), bucket.gradients()[i].sizes());
        ++n_seen;
      }
      return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .group = group, .async_op = true})
          .get_future();
    };
    model->register_comm_hook({.run = look, .name = "looks"});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss_of(model->forward(batch(step, setup.half))).backward();
      optimizer.step();
    }
    EXPECT_EQ(n_seen, kSteps * static_cast<std::int64_t>(setup.net->parameters().size()));
    expect_same_parameters(*setup.net, *one, "with a hook");
  });
}

TEST(DdpOverTensorParallel, ComputesInLowPrecisionAndKeepsTheStyles) {
  const Net one = trained_alone<SGD>(SGDOptions(0.1));
  world(4, [&](int) {
    Fixture setup;
    const MixedPrecision bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    auto model =
        DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"], .mixed_precision = bf16});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const auto y = model->forward(batch(step, setup.half).to(at::kBFloat16));
      EXPECT_FALSE(is_dtensor(y));  // as the style of the last row-wise layer says
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      loss_of(y.to(at::kFloat)).backward();
      optimizer.step();
    }
    for (const auto& p : setup.net->parameters()) EXPECT_EQ(p.scalar_type(), at::kFloat);
    expect_same_parameters(*setup.net, *one, "bf16", 0.05);
  });
}

// ---- L26, clause by clause ----

TEST(DdpOverTensorParallel, IgnoredParametersAreNamedByPathAndStayTheirOwn) {
  world(4, [&](int) {
    Fixture setup;
    if (setup.half == 1) {
      const c10::NoGradGuard no_grad;
      setup.net->named_parameters()["blocks.0.up.weight"].mul_(2);
    }
    auto model = DistributedDataParallel(
        setup.net, {.device_mesh = setup.mesh["dp"], .ignored = {"blocks.0.up.weight", "head.bias"}});
    const Net one;
    const auto factor = setup.half == 1 ? 2.0 : 1.0;
    const auto mine = setup.net->named_parameters()["blocks.0.up.weight"];
    expect_close(mine, one->named_parameters()["blocks.0.up.weight"] * factor, "not synced");
    loss_of(model->forward(batch(0, setup.half))).backward();
    // Not averaged: what this half alone gives.
    Net alone;
    {
      const c10::NoGradGuard no_grad;
      alone->named_parameters()["blocks.0.up.weight"].mul_(factor);
    }
    loss_of(alone(batch(0, setup.half))).backward();
    expect_close(mine.grad(), alone->named_parameters()["blocks.0.up.weight"].grad(), "not averaged");
  });
  world(4, [](int) {
    Fixture setup;
    try {
      DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"], .ignored = {"blocks.0.weight"}});
      ADD_FAILURE() << "a path that names nothing was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("\"blocks.0.weight\", which is not a parameter"),
                std::string::npos)
          << error.what();
    }
  });
}

// A hook on a parameter may leave a collective running: the reducer waits for it.
TEST(DdpOverTensorParallel, AsynchronousGradientsAreWaitedFor) {
  world(4, [&](int) {
    Fixture setup;
    auto weight = setup.net->named_parameters()["blocks.0.up.weight"];
    weight.register_hook([](const at::Tensor& gradient) {
      const c10::NoGradGuard no_grad;
      return redistribute(redistribute(gradient, {Replicate()}), {Shard(1)}, {.async_op = true});
    });
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    Net one;
    loss_of(one(at::cat({batch(0, 0), batch(0, 1)}))).backward();
    loss_of(model->forward(batch(0, setup.half))).backward();
    EXPECT_EQ(placements(weight.grad()), Placements{Shard(0)});
    for (const auto& item : one->named_parameters())
      expect_close(setup.net->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
  });
}

// A gradient that something else refers to, which may read it later in the same pass, is copied before it is
// reduced, wherever it was allocated.
TEST(DdpOverTensorParallel, GradientsThatSomethingElseRefersToAreNotReducedInPlace) {
  world(4, [&](int) {
    const auto n_in_place = [](bool keeps) {
      Fixture setup;
      at::Tensor kept;
      auto weight = setup.net->named_parameters()["blocks.0.up.weight"];
      if (keeps) weight.register_hook([&](const at::Tensor& gradient) { kept = gradient.detach(); });
      auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"], .in_place_bytes = 1});
      loss_of(model->forward(batch(0, setup.half))).backward();
      return model->stats().n_in_place;
    };
    const auto all = n_in_place(false);
    EXPECT_GE(all, 12U);  // the sharded ones and the norms
    EXPECT_EQ(n_in_place(true), all - 1);
  });
}

TEST(DdpOverTensorParallel, DelayedParametersMayBeSharded) {
  world(4, [&](int) {
    Fixture setup;
    auto model = DistributedDataParallel(
        setup.net, {.device_mesh = setup.mesh["dp"],
                    .delay_all_reduce_named_params = {"blocks.1.up.weight", "blocks.1.down.weight"},
                    .param_to_hook_all_reduce = "blocks.0.up.weight"});
    Net one;
    for (const int step : {0, 1}) {
      model->zero_grad(step == 0);
      one->zero_grad();
      loss_of(one(at::cat({batch(step, 0), batch(step, 1)}))).backward();
      loss_of(model->forward(batch(step, setup.half))).backward();
      for (const auto& item : one->named_parameters())
        expect_close(setup.net->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
    }
  });
}

// A row of the mesh that is out of batches shadows the other: zeros into the sums, no tensor parallel pass.
TEST(DdpOverTensorParallel, RowsOfTheMeshMayRunOutOfInput) {
  world(4, [&](int) {
    Fixture setup;
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    const int n = setup.half == 0 ? 2 : 3;
    join({*model},
         [&] {
           for (int step = 0; step < n; ++step) {
             optimizer.zero_grad();
             loss_of(model->forward(batch(step, setup.half))).backward();
             optimizer.step();
           }
         },
         {.divide_by_initial_world_size = false});
    Net one;
    SGD alone(one->parameters(), SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      alone.zero_grad();
      loss_of(one(step < 2 ? at::cat({batch(step, 0), batch(step, 1)}) : batch(step, 1))).backward();
      alone.step();
    }
    expect_same_parameters(*setup.net, *one, "uneven");
  });
}

// ---- what is refused ----

std::string refusal(const Net& net, DdpOptions options) {
  try {
    DistributedDataParallel(net, std::move(options));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "nothing";
}

TEST(DdpOverTensorParallel, AveragingDifferentPiecesIsRefused) {
  world(4, [](int) {
    Fixture setup;
    const CommDebugScope scope;
    const auto all = refusal(setup.net, {});
    EXPECT_NE(all.find("parameter blocks.0.up.weight is sharded over a mesh, 2 ranks of which are in group"),
              std::string::npos)
        << all;
    EXPECT_NE(all.find(".device_mesh = mesh[\"dp\"]"), std::string::npos) << all;
    const auto tp = refusal(setup.net, {.device_mesh = setup.mesh["tp"]});
    EXPECT_NE(tp.find("so different pieces would be mixed"), std::string::npos) << tp;
    const auto both =
        refusal(setup.net, {.group = setup.mesh["dp"].get_group(), .device_mesh = setup.mesh["dp"]});
    EXPECT_NE(both.find("give group or device_mesh, not both"), std::string::npos) << both;
    const auto flat = refusal(setup.net, {.device_mesh = setup.mesh});
    EXPECT_NE(flat.find("device_mesh has 2 dimensions"), std::string::npos) << flat;
    const auto zero = [&] {
      try {
        ZeroRedundancyOptimizer<SGD>(setup.net->parameters(), SGDOptions(0.1));
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("nothing");
    }();
    EXPECT_NE(zero.find("ZeroRedundancyOptimizer: parameter 2 of group 0 is sharded over a mesh"),
              std::string::npos)
        << zero;
    EXPECT_NE(zero.find(".group = mesh[\"dp\"].get_group()"), std::string::npos) << zero;
    EXPECT_EQ(scope.total(), 0) << scope.describe();
  });
}

}  // namespace
}  // namespace lockstep
