// Stock modules and optimizers of libtorch on sharded parameters, against one process.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/random.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(8, 12));
    down = register_module("down", torch::nn::Linear(12, 8));
    for (auto& p : parameters()) p.detach().copy_(waves(p.sizes(), p.size(0)) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

void shard(at::Tensor& parameter, const DeviceMesh& mesh, const Placement& placement) {
  parameter.set_data(distribute_tensor(parameter.detach(), mesh, {placement}));
}

// Megatron's split: the first layer by columns, the second by rows.
void shard_mlp(Mlp& mlp, const DeviceMesh& mesh) {
  shard(mlp->up->weight, mesh, Shard(0));
  shard(mlp->up->bias, mesh, Shard(0));
  shard(mlp->down->weight, mesh, Shard(1));
  shard(mlp->down->bias, mesh, Replicate());
}

TEST(Modules, AnMlpSplitByColumnsAndRowsTrainsAsInOneProcess) {
  for (const int n : {2, 3}) {
    world(n, [&](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      for (const bool adam : {false, true}) {
        Mlp one, many;
        shard_mlp(many, mesh);
        ASSERT_TRUE(is_dtensor(many->parameters()[0]));
        const auto optimizer = [&](Mlp& mlp) -> std::unique_ptr<torch::optim::Optimizer> {
          if (adam)
            return std::make_unique<torch::optim::AdamW>(mlp->parameters(), torch::optim::AdamWOptions(0.01));
          return std::make_unique<torch::optim::SGD>(
              mlp->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
        };
        const auto a = optimizer(one), b = optimizer(many);
        for (int step = 0; step < 3; ++step) {
          const auto x = waves({5, 8}, step);
          a->zero_grad();
          b->zero_grad();
          auto loss = one(x).pow(2).mean();
          auto sharded = many(distribute_tensor(x, mesh)).pow(2).mean();
          expect_whole(sharded, loss, "loss");
          loss.backward();
          sharded.backward();
          const auto norm = torch::nn::utils::clip_grad_norm_(one->parameters(), 0.5);
          EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(many->parameters(), 0.5), norm, 1e-4);
          a->step();
          b->step();
        }
        for (std::size_t i = 0; i < one->parameters().size(); ++i) {
          expect_whole(many->parameters()[i], one->parameters()[i], base::cat("parameter ", i));
          EXPECT_TRUE(is_dtensor(many->parameters()[i]));
        }
      }
    });
  }
}

TEST(Modules, AnMlpSplitByColumnsAndRowsNeedsOneReductionEachWay) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp mlp;
    shard_mlp(mlp, mesh);
    const auto x = distribute_tensor(waves({4, 8}), mesh).requires_grad_();
    at::Tensor y;
    {
      const CommDebugScope scope;
      y = redistribute(mlp(x), {Replicate()});
      EXPECT_EQ(scope.describe(), "all_reduce 1");
    }
    const CommDebugScope scope;
    y.sum().backward();
    full_tensor(x.grad());
    EXPECT_EQ(scope.describe(), "all_reduce 1");
  });
}

struct BlockImpl : torch::nn::Module {
  static constexpr int kWidth = 16, kHeads = 4, kWords = 10;
  BlockImpl() {
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    for (auto& p : parameters()) p.detach().copy_(waves(p.sizes(), p.numel()) * 0.4);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto x = words(tokens);
    const auto b = x.size(0), s = x.size(1);
    const auto heads = qkv(norm(x)).view({b, s, kHeads, 3 * kWidth / kHeads}).transpose(1, 2).chunk(3, -1);
    const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
    const auto y = x + out(mixed.transpose(1, 2).reshape({b, s, kWidth}));
    return at::linear(y, words->weight);  // tied
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(Block);

TEST(Modules, AnAttentionBlockSplitByHeadsIsThatOfOneProcess) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto tokens = (at::arange(12, at::kLong) * 7).remainder(10).reshape({2, 6});
    const auto targets = (at::arange(12, at::kLong) * 3).remainder(10);
    Block one;
    const auto loss = at::cross_entropy_loss(one(tokens).view({12, 10}), targets);
    loss.backward();
    for (const auto& words : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
      Block many;
      shard(many->words->weight, mesh, words);
      shard(many->norm->weight, mesh, Replicate());
      shard(many->norm->bias, mesh, Replicate());
      shard(many->qkv->weight, mesh, Shard(0));
      shard(many->qkv->bias, mesh, Shard(0));
      shard(many->out->weight, mesh, Shard(1));
      shard(many->out->bias, mesh, Replicate());
      const auto sharded = at::cross_entropy_loss(many(distribute_tensor(tokens, mesh)).view({12, 10}),
                                                  distribute_tensor(targets, mesh));
      expect_whole(sharded, loss, "loss");
      sharded.backward();
      for (const auto& item : one->named_parameters()) {
        expect_whole(many->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
      }
    }
  });
}

TEST(Modules, HeadShardedAttentionGathersNothing) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto q = distribute_tensor(waves({2, 4, 6, 8}), mesh, {Shard(1)}).requires_grad_();
    const CommDebugScope scope;
    const auto y = at::scaled_dot_product_attention(q, q, q, {}, 0.0, true);
    EXPECT_EQ(placements(y), Placements{Shard(1)});
    y.sum().backward();
    EXPECT_EQ(scope.describe(), "none");
  });
}

TEST(Modules, DropoutInAttentionIsThatOfOneProcess) {
  at::set_num_threads(1);
  const auto q = waves({2, 4, 6, 8});
  const auto one = q.clone().requires_grad_();
  torch::manual_seed(5);
  const auto expected = at::scaled_dot_product_attention(one, one, one, {}, 0.25, true);
  expected.pow(2).sum().backward();
  world(2, [&](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    manual_seed(5, mesh);
    const auto x = distribute_tensor(q, mesh, {Shard(1)}).requires_grad_();
    const ImplicitReplicationScope masks;  // libtorch makes the causal mask, which is plain
    const CommDebugScope scope;
    const auto y = at::scaled_dot_product_attention(x, x, x, {}, 0.25, true);
    y.pow(2).sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    expect_whole(y, expected, "result");
    expect_whole(x.grad(), one.grad(), "gradient");
  });
}

TEST(Modules, DropoutIsThatOfOneProcess) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto plain = at::make_generator<at::CPUGeneratorImpl>(5);
    const auto mask = at::empty({5, 4}).bernoulli_(0.75, plain).div_(0.75);
    manual_seed(5, mesh);
    const auto x = distribute_tensor(waves({5, 4}), mesh, {Shard(0)});
    expect_whole(at::dropout(x, 0.25, true), waves({5, 4}) * mask, "dropout");
    // What CUDA's dropout is.
    const auto leaf = distribute_tensor(waves({5, 4}), mesh, {Shard(0)}).requires_grad_();
    manual_seed(5, mesh);
    std::get<0>(at::native_dropout(leaf, 0.25, true)).sum().backward();
    expect_whole(leaf.grad(), mask, "gradient of native_dropout");
    const auto part = from_local(waves({5, 4}) / 2, mesh, {Partial()});
    for (const auto& input : {x, part}) {
      manual_seed(5, mesh);
      const auto [result, kept] = at::native_dropout(input, 0.25, true);
      expect_whole(result, waves({5, 4}) * mask, "native_dropout");
      expect_whole(kept, mask > 0, "mask");
    }
    expect_whole(std::get<0>(at::native_dropout(x, 0.25, false)), waves({5, 4}), "not in training");
  });
}

TEST(Modules, WorkInInferenceMode) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp one, many;
    shard_mlp(many, mesh);
    const c10::InferenceMode inference;
    const auto x = waves({5, 8});
    expect_whole(many->forward(distribute_tensor(x, mesh)), one->forward(x), "result");
  });
}

TEST(Modules, AreCastByAutocast) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp one, many;
    shard_mlp(many, mesh);
    const auto x = waves({5, 8});
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto expected = one->forward(x), actual = many->forward(distribute_tensor(x, mesh));
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
    EXPECT_EQ(expected.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(full_tensor(actual).to(at::kFloat), expected.to(at::kFloat), 0.02, 0.02));
  });
}

TEST(Factories, MakeWhatTheirNamesSay) {
  world(3, [](int) {
    const auto mesh = init_device_mesh("cpu", {3});
    for (const auto& layout : {Placements{}, Placements{Shard(0)}, Placements{Shard(1)}}) {
      expect_whole(dtensor::zeros({5, 4}, mesh, layout), at::zeros({5, 4}), "zeros");
      expect_whole(dtensor::ones({5, 4}, mesh, layout), at::ones({5, 4}), "ones");
      expect_whole(dtensor::full({5, 4}, 2.5, mesh, layout), at::full({5, 4}, 2.5), "full");
      EXPECT_EQ(dtensor::empty({5, 4}, mesh, layout, at::kLong).scalar_type(), at::kLong);
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
      manual_seed(3, mesh);
      expect_whole(dtensor::randn({5, 4}, mesh, layout), at::randn({5, 4}, generator), "randn");
      EXPECT_TRUE(dtensor::rand({5, 4}, mesh, layout, at::requires_grad()).requires_grad());
    }
  });
}

}  // namespace
}  // namespace lockstep
