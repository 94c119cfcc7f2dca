// Random numbers on meshes of one to three dimensions: those of one process, whatever the placements, also
// where pieces differ in size or are empty.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/random.h"

namespace lockstep {
namespace {

using testing::waves;
using testing::world;

constexpr std::uint64_t kSeed = 11;
// Over 2, 4 and 8 ranks: pieces of 3 and 2, of 2 and 1, and empty ones. 35 elements: more than the 16 at
// which normal_ draws in another order.
const std::vector<std::int64_t> kUneven{5, 7};

struct Draws {
  at::Tensor dropped, gradient, normal, uniform, bernoulli, kaiming, xavier, made;
};

// What a program draws after it was seeded, in this order. `make` places a tensor.
template <class Make, class Randn>
Draws draw(const Make& make, const Randn& randn) {
  Draws draws;
  const auto x = make(waves(kUneven)).requires_grad_();
  draws.dropped = at::dropout(x, 0.4, true);
  draws.dropped.sum().backward();
  draws.gradient = x.grad();
  const c10::NoGradGuard no_grad;
  draws.normal = make(at::zeros(kUneven)).normal_(1, 2);
  draws.uniform = at::rand_like(x);
  draws.bernoulli = at::bernoulli(make(at::full(kUneven, 0.3)));
  draws.kaiming = torch::nn::init::kaiming_uniform_(make(at::zeros(kUneven)), 2);
  draws.xavier = torch::nn::init::xavier_normal_(make(at::zeros(kUneven)));
  draws.made = randn();
  return draws;
}

// Equal bits: the numbers are drawn by the same kernel in the same order.
void expect_same(const Draws& actual, const Draws& expected, const std::string& what) {
  const auto same = [&](const at::Tensor& a, const at::Tensor& b, const char* which) {
    testing::expect_equal(full_tensor(a.detach()), b.detach(), what + " " + which);
  };
  same(actual.dropped, expected.dropped, "dropout");
  same(actual.gradient, expected.gradient, "gradient of dropout");
  same(actual.normal, expected.normal, "normal_");
  same(actual.uniform, expected.uniform, "rand_like");
  same(actual.bernoulli, expected.bernoulli, "bernoulli");
  same(actual.kaiming, expected.kaiming, "kaiming_uniform_");
  same(actual.xavier, expected.xavier, "xavier_normal_");
  same(actual.made, expected.made, "randn");
}

Draws of_one_process() {
  at::set_num_threads(1);
  torch::manual_seed(kSeed);
  return draw([](const at::Tensor& t) { return t.clone(); }, [] { return at::randn(kUneven); });
}

void expect_one_process(const std::vector<std::int64_t>& shape, const std::vector<Placements>& layouts) {
  const auto expected = of_one_process();
  std::int64_t n = 1;
  for (const auto size : shape) n *= size;
  world(static_cast<int>(n), [&](int) {
    const auto mesh = init_device_mesh("cpu", shape);
    for (const auto& layout : layouts) {
      manual_seed(kSeed, mesh);
      const CommDebugScope scope;
      const auto draws =
          draw([&](const at::Tensor& t) { return distribute_tensor(t, mesh, layout, {.src_data_rank = {}}); },
               [&] { return dtensor::randn(kUneven, mesh, layout); });
      // One: bernoulli reads the probabilities of the whole.
      EXPECT_LE(scope.total(), static_cast<std::int64_t>(layout.size())) << scope.describe();
      expect_same(draws, expected, to_string(layout));
    }
  });
}

// The ways to place a matrix on `n_dims` mesh dimensions.
std::vector<Placements> layouts_on(std::size_t n_dims) {
  std::vector<Placements> layouts{{}};
  for (std::size_t m = 0; m < n_dims; ++m) {
    std::vector<Placements> longer;
    for (const auto& layout : layouts) {
      for (const Placement& kind : {Placement(), Placement(Shard(0)), Placement(Shard(1))}) {
        longer.push_back(layout);
        longer.back().push_back(kind);
      }
    }
    layouts = std::move(longer);
  }
  return layouts;
}

TEST(Random, NumbersOnOneDimensionAreThoseOfOneProcess) {
  for (const std::int64_t n : {1, 2, 3, 4}) expect_one_process({n}, layouts_on(1));
}

TEST(Random, NumbersOnTwoDimensionsAreThoseOfOneProcess) {
  expect_one_process({2, 2}, layouts_on(2));
  expect_one_process({3, 2}, layouts_on(2));
}

TEST(Random, NumbersOnThreeDimensionsAreThoseOfOneProcess) {
  expect_one_process({2, 2, 2}, layouts_on(3));
}

}  // namespace
}  // namespace lockstep
