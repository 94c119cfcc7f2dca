// torch::optim and the operators of optimizers on sharded parameters, against one process.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>

#include <functional>
#include <limits>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;
using Tensors = std::vector<at::Tensor>;

Tensors parameters() {
  return {waves({5, 4}, 1).requires_grad_(), waves({5}, 2).requires_grad_(),
          waves({3, 5}, 3).requires_grad_(), waves({}, 4).requires_grad_()};
}
at::Tensor loss_of(const Tensors& p, const at::Tensor& x) {
  return (at::linear(at::linear(x, p[0], p[1]).tanh(), p[2]) * p[3]).pow(2).mean();
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;
const std::vector<std::pair<const char*, Make>> kOptimizers{
    {"SGD",
     [](const Tensors& p) {
       return std::make_unique<torch::optim::SGD>(
           p, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true));
     }},
    {"Adam",
     [](const Tensors& p) {
       return std::make_unique<torch::optim::Adam>(
           p, torch::optim::AdamOptions(0.02).amsgrad(true).weight_decay(0.01));
     }},
    {"AdamW",
     [](const Tensors& p) {
       return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.02));
     }},
    {"Adagrad",
     [](const Tensors& p) {
       return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.05).lr_decay(0.1));
     }},
    {"RMSprop",
     [](const Tensors& p) {
       return std::make_unique<torch::optim::RMSprop>(
           p, torch::optim::RMSpropOptions(0.02).momentum(0.5).centered(true));
     }},
};

// Three steps with clipped gradients, on one process and on the mesh.
void expect_same_steps(const DeviceMesh& mesh, const std::vector<Placements>& layouts,
                       const Placements& input) {
  for (const auto& [name, make] : kOptimizers) {
    const auto one = parameters();
    Tensors many;
    for (std::size_t i = 0; i < one.size(); ++i)
      many.push_back(distribute_tensor(one[i].detach().clone().requires_grad_(), mesh, layouts[i]));
    const auto a = make(one), b = make(many);
    for (int step = 0; step < 3; ++step) {
      const auto what = base::cat(name, " step ", step, " ", to_string(layouts[0]));
      a->zero_grad();
      b->zero_grad();
      loss_of(one, waves({6, 4}, step)).backward();
      loss_of(many, distribute_tensor(waves({6, 4}, step), mesh, input)).backward();
      const auto norm = torch::nn::utils::clip_grad_norm_(one, 0.1);
      EXPECT_GT(norm, 0.1) << "nothing is clipped";
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(many, 0.1), norm, 1e-4) << what;
      a->step();
      b->step();
      for (std::size_t i = 0; i < one.size(); ++i) {
        expect_whole(many[i], one[i], base::cat(what, " parameter ", i));
        EXPECT_EQ(placements(many[i]), layouts[i]);
      }
    }
  }
}

TEST(Optimizers, StepOnShardsAsInOneProcess) {
  for (const int n : {2, 3}) {
    world(n, [n](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      const Placements r{Replicate()}, s0{Shard(0)}, s1{Shard(1)};
      expect_same_steps(mesh, {s0, s0, s1, r}, r);  // columns, then rows
      expect_same_steps(mesh, {s1, r, s0, r}, r);
      expect_same_steps(mesh, {r, r, r, r}, s0);  // gradients are partial sums
    });
  }
}

TEST(Optimizers, StepOnTwoDimensionsAsInOneProcess) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const Placements r{Replicate(), Replicate()};
    expect_same_steps(mesh, {{Replicate(), Shard(0)}, {Replicate(), Shard(0)}, {Replicate(), Shard(1)}, r},
                      {Shard(0), Replicate()});
    expect_same_steps(mesh, {{Shard(1), Shard(0)}, {Shard(0), Shard(0)}, {Shard(0), Shard(1)}, r}, r);
  });
}

TEST(Optimizers, NormsOverOtherOrdersAreThoseOfOneProcess) {
  world(3, [](int) {
    const auto mesh = init_device_mesh("cpu", {3});
    for (const double order : {1.0, 3.0, std::numeric_limits<double>::infinity()}) {
      Tensors one{waves({5, 4}), waves({4}, 1)}, many;
      for (auto& p : one) {
        p.requires_grad_().mutable_grad() = p.detach() * 2;
        many.push_back(distribute_tensor(p.detach(), mesh, {Shard(0)}).requires_grad_());
        many.back().mutable_grad() = distribute_tensor(p.detach() * 2, mesh, {Shard(0)});
      }
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(many, 0.5, order),
                  torch::nn::utils::clip_grad_norm_(one, 0.5, order), 1e-4);
      for (std::size_t i = 0; i < one.size(); ++i) expect_whole(many[i].grad(), one[i].grad(), "gradient");
    }
  });
}

TEST(Optimizers, ListsThatArePlacedAlikeSendNothing) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto make = [&](double shift) {
      return Tensors{distribute_tensor(waves({5, 4}, shift), mesh, {Shard(1)}),
                     distribute_tensor(waves({5}, shift), mesh, {Shard(0)}),
                     distribute_tensor(waves({3}, shift), mesh, {Replicate()})};
    };
    auto p = make(0), g = make(1), m = make(2), v = make(3);
    at::_foreach_abs_(v);
    const Tensors steps(3, at::scalar_tensor(1.0f));
    const CommDebugScope scope;
    at::_foreach_add_(p, g, 0.5);
    at::_foreach_mul_(p, 2.0);
    at::_foreach_addcdiv_(p, m, v, 0.1);
    at::_foreach_lerp_(m, g, 0.1);
    at::_fused_adam_(p, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
    at::_fused_adamw_(p, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
    at::_fused_sgd_(p, g, m, 0.01, 0.9, 0.1, 0, false, false, false);
    const auto sums = at::_foreach_add(p, g);
    const auto roots = at::_foreach_sqrt(at::_foreach_abs(g));
    EXPECT_EQ(scope.describe(), "none");
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(placements(sums[i]), placements(p[i]));
    EXPECT_EQ(placements(roots[0]), Placements{Shard(1)});
  });
}

TEST(Optimizers, ListsThatArePlacedOtherwiseAreWorkedOnItemByItem) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = waves({5, 4});
    // A gradient that is still a partial sum, a broadcast one, and one that is cut otherwise.
    const Tensors plain{whole * 3, waves({4}, 1), waves({5, 4}, 2)};
    const Tensors g{from_local(whole * (rank + 1), mesh, {Partial()}),
                    distribute_tensor(plain[1], mesh, {Shard(0)}),
                    distribute_tensor(plain[2], mesh, {Shard(0)})};
    Tensors p, expected;
    for (const auto& layout : {Placement(Shard(0)), Placement(Shard(0)), Placement(Shard(1))}) {
      p.push_back(distribute_tensor(whole, mesh, {layout}));
      expected.push_back(whole.clone());
    }
    at::_foreach_add_(p, g, 0.5);
    at::_foreach_add_(expected, plain, 0.5);
    const auto norms = at::_foreach_norm(g, 2);
    const auto plain_norms = at::_foreach_norm(plain, 2);
    for (std::size_t i = 0; i < p.size(); ++i) {
      expect_whole(p[i], expected[i], base::cat("sum ", i));
      expect_whole(norms[i], plain_norms[i], base::cat("norm ", i));
    }
    // Scaling a partial sum scales its parts.
    const CommDebugScope scope;
    at::_foreach_mul_({g[0]}, 2.0);
    EXPECT_EQ(scope.describe(), "none");
    EXPECT_EQ(placements(g[0]), Placements{Partial()});
    expect_whole(g[0], plain[0] * 2, "scaled");
  });
}

}  // namespace
}  // namespace lockstep
