// SyncBatchNorm on the parts of a batch against torch's BatchNorm on the whole of it.
#include "lockstep/nn/sync_batch_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/nn/checkpoint.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep {
namespace {

constexpr std::int64_t kChannels = 3;

using tensor_testing::drawn;
using tensor_testing::refusal;

void expect_close(const at::Tensor& a, const at::Tensor& b, const std::string& what,
                  double tolerance = 1e-6) {
  const double scale = b.numel() == 0 ? 1 : std::max(1.0, b.abs().max().item<double>());
  const double distance = b.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
  EXPECT_LE(distance, tolerance * scale) << what;
}

at::Tensor plain_norm(torch::nn::BatchNorm1d& norm, const at::Tensor& x) {
  // BatchNorm1d takes two and three dimensions: flatten the rest.
  return x.dim() <= 3 ? norm(x) : norm(x.flatten(2)).view(x.sizes());
}

void give_values(at::Tensor weight, at::Tensor bias) {
  torch::NoGradGuard no_grad;
  weight.copy_(drawn(90, weight.sizes()) + 1);
  bias.copy_(drawn(91, bias.sizes()));
}

struct Setup {
  std::vector<std::int64_t> rows;  // of each rank
  std::vector<std::int64_t> inner{};
  torch::nn::BatchNormOptions options{kChannels};
  int n_steps = 3;
  double offset = 0;
  double tolerance = 1e-6;
};

// Trains a few steps both ways and compares everything.
void expect_like_whole(const Setup& setup) {
  const std::int64_t n_rows = std::accumulate(setup.rows.begin(), setup.rows.end(), std::int64_t{0});
  std::vector<std::int64_t> sizes{n_rows, kChannels};
  sizes.insert(sizes.end(), setup.inner.begin(), setup.inner.end());
  run_threads(static_cast<int>(setup.rows.size()), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t begin =
        std::accumulate(setup.rows.begin(), setup.rows.begin() + rank, std::int64_t{0});
    torch::nn::BatchNorm1d whole(setup.options);
    SyncBatchNorm part(setup.options);
    const bool affine = setup.options.affine();
    if (affine) give_values(whole->weight, whole->bias), give_values(part->weight, part->bias);
    for (int step = 0; step < setup.n_steps; ++step) {
      const auto seed = static_cast<std::uint64_t>(step);
      at::Tensor all = (drawn(seed, sizes) + setup.offset).requires_grad_();
      at::Tensor mine = all.detach().narrow(0, begin, setup.rows[r]).clone().requires_grad_();
      const at::Tensor gradient = drawn(50 + seed, sizes);
      const at::Tensor want = plain_norm(whole, all);
      want.backward(gradient);
      const at::Tensor got = part(mine);
      got.backward(gradient.narrow(0, begin, setup.rows[r]));
      const double loose = setup.tolerance * std::max(1.0, setup.offset);
      expect_close(got, want.narrow(0, begin, setup.rows[r]), "output", loose);
      expect_close(mine.grad(), all.grad().narrow(0, begin, setup.rows[r]), "gradient of the input", loose);
    }
    if (affine) {
      at::Tensor sum = torch::cat({part->weight.grad(), part->bias.grad()});
      all_reduce(sum);
      expect_close(sum, torch::cat({whole->weight.grad(), whole->bias.grad()}), "gradients of the parameters",
                   2e-6 * std::max(1.0, setup.offset));
    }
    if (!setup.options.track_running_stats()) return;
    expect_close(part->running_mean, whole->running_mean, "running mean");
    expect_close(part->running_var, whole->running_var, "running variance",
                 1e-6 * std::max(1.0, setup.offset));
    EXPECT_TRUE(torch::equal(part->num_batches_tracked, whole->num_batches_tracked));
    at::Tensor bits = torch::empty({get_world_size(), 2 * kChannels});
    all_gather_into_tensor(bits, torch::cat({part->running_mean, part->running_var}));
    for (int i = 1; i < get_world_size(); ++i) EXPECT_TRUE(torch::equal(bits[i], bits[0])) << "rank " << i;
    part->eval(), whole->eval();
    const at::Tensor x = drawn(99, sizes);
    expect_close(part(x), plain_norm(whole, x), "in eval mode");
  });
}

TEST(SyncBatchNorm, EqualsBatchNormOnTheWholeBatchInAnyDimension) {
  expect_like_whole({.rows = {4, 4}});
  expect_like_whole({.rows = {2, 2, 2}, .inner = {5}});
  expect_like_whole({.rows = {2, 2}, .inner = {4, 3}});
  expect_like_whole({.rows = {1, 1, 1, 1}, .inner = {2, 3, 2}});
}

TEST(SyncBatchNorm, BatchesMayDifferInSizeAndBeEmpty) {
  expect_like_whole({.rows = {1, 5, 2}});
  expect_like_whole({.rows = {0, 3, 2}, .inner = {4}});
  expect_like_whole({.rows = {3, 0}, .inner = {2, 2}});
  expect_like_whole({.rows = {1, 1}, .tolerance = 1e-5});  // two values: a small variance magnifies rounding
}

TEST(SyncBatchNorm, OptionsAreThoseOfBatchNorm) {
  using Options = torch::nn::BatchNormOptions;
  expect_like_whole({.rows = {3, 2}, .options = Options(kChannels).momentum(0.3).eps(0.01)});
  expect_like_whole({.rows = {3, 2}, .options = Options(kChannels).momentum(std::nullopt)});
  expect_like_whole({.rows = {3, 2}, .options = Options(kChannels).affine(false)});
  expect_like_whole({.rows = {3, 2}, .options = Options(kChannels).track_running_stats(false)});
}

TEST(SyncBatchNorm, ALargeMeanDoesNotSpoilTheVariance) {
  expect_like_whole({.rows = {40, 7}, .inner = {6}, .n_steps = 1, .offset = 1000});
}

TEST(SyncBatchNorm, InAWorldOfOneIsBatchNorm) {
  torch::nn::BatchNorm1d whole(kChannels);
  SyncBatchNorm part(kChannels);  // no group at all
  const at::Tensor x = drawn(1, {5, kChannels});
  EXPECT_TRUE(torch::equal(part(x), whole(x)));
  run_threads(1, [&](int) { EXPECT_TRUE(torch::equal(part(x), whole(x))); });
  EXPECT_TRUE(torch::equal(part->running_var, whole->running_var));
}

TEST(SyncBatchNorm, DoubleAndHalfTypesWork) {
  run_threads(2, [](int rank) {
    const at::Tensor all = drawn(3, {8, kChannels, 4});
    torch::nn::BatchNorm1d whole(kChannels);
    const at::Tensor want = whole(all).narrow(0, 4 * rank, 4);
    for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
      SyncBatchNorm part(kChannels);
      if (dtype == at::kDouble) part->to(at::kDouble);
      at::Tensor x = all.narrow(0, 4 * rank, 4).to(dtype).requires_grad_();
      const at::Tensor y = part(x);
      y.square().sum().backward();
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_EQ(x.grad().scalar_type(), dtype);
      expect_close(y.to(at::kFloat), want, "output", dtype == at::kDouble ? 1e-6 : 2e-2);
    }
  });
}

TEST(SyncBatchNorm, RefusesWhatDoesNotFit) {
  EXPECT_NE(refusal([] { SyncBatchNorm(0); }).find("must be positive"), std::string::npos);
  run_threads(2, [](int rank) {
    SyncBatchNorm norm(kChannels);
    auto words = refusal([&] { norm(torch::zeros({4, kChannels + 1})); });
    EXPECT_NE(words.find("SyncBatchNorm(3): the input is [4, 4]"), std::string::npos) << words;
    words = refusal([&] { norm(torch::zeros({rank, kChannels})); });
    EXPECT_NE(words.find("one value per channel"), std::string::npos) << words;
    const at::Tensor x = drawn(1, {4, kChannels}).requires_grad_();
    words = refusal([&] { torch::autograd::grad({norm(x).square().sum()}, {x}, {}, true, true); });
    EXPECT_NE(words.find("create_graph"), std::string::npos) << words;
  });
  SyncBatchNorm alone(kChannels);
  const auto words = refusal([&] { alone(torch::zeros({1, kChannels})); });
  EXPECT_NE(words.find("one value per channel"), std::string::npos) << words;
}

TEST(SyncBatchNorm, UsesTheGroupItIsGiven) {
  run_threads(4, [](int rank) {
    const Group pair = new_subgroups(2).mine;
    SyncBatchNorm norm(kChannels, {.group = pair});
    const at::Tensor all = drawn(static_cast<std::uint64_t>(rank / 2), {6, kChannels});
    torch::nn::BatchNorm1d whole(kChannels);
    expect_close(norm(all.narrow(0, 3 * (rank % 2), 3)), whole(all).narrow(0, 3 * (rank % 2), 3), "output");
  });
}

TEST(SyncBatchNorm, AShadowTakesPartWithNothing) {
  run_threads(3, [](int rank) {
    SyncBatchNorm first(kChannels), second(kChannels);
    torch::nn::BatchNorm1d whole(kChannels);
    const at::Tensor all = drawn(7, {6, kChannels});
    whole(all);
    if (rank == 2) {
      first->shadow_forward();
      second->shadow_forward();
      second->shadow_backward();
      first->shadow_backward();
      return;
    }
    at::Tensor x = all.narrow(0, 3 * rank, 3).clone().requires_grad_();
    second(first(x)).square().sum().backward();
    EXPECT_TRUE(x.grad().defined());
    expect_close(first->running_mean, whole->running_mean, "running mean");
  });
}

TEST(SyncBatchNorm, HasABackgroundShadowOverTheMembersOfItsOwnGroupOnly) {
  const auto store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    // The same numbers, and another rank behind each.
    const auto backwards = create_group({.store = store, .rank = 1 - rank, .size = 2, .name = "backwards"});
    SyncBatchNorm other(kChannels, {.group = backwards});
    const auto words = refusal([&] { other->make_background_shadow({other.get()}, default_group()); });
    EXPECT_NE(words.find("another group than the model"), std::string::npos) << words;
    SyncBatchNorm same(kChannels, {.group = new_group()});
    EXPECT_NE(same->make_background_shadow({same.get()}, default_group()), nullptr);
  });
}

TEST(SyncBatchNorm, WorksInsideACheckpointedRegion) {
  run_threads(2, [](int rank) {
    SyncBatchNorm norm(kChannels);
    const auto gradient = [&](bool saved) {
      const at::Tensor x = drawn(static_cast<std::uint64_t>(rank), {4, kChannels}).requires_grad_();
      const auto fn = [norm = norm.ptr()](const at::Tensor& t) { return norm->forward(t.exp()).square(); };
      (saved ? checkpoint(fn, x) : fn(x)).square().sum().backward();
      return x.grad();
    };
    EXPECT_TRUE(torch::equal(gradient(false), gradient(true)));
  });
}

// ---- converting ----

TEST(ConvertSyncBatchNorm, ReplacesLayersInContainersAndKeepsTheirTensors) {
  torch::nn::BatchNorm2d shared(4);
  torch::nn::Sequential net;
  net->push_back("conv", torch::nn::Conv2d(3, 4, 1));
  net->push_back("norm", torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(4).momentum(0.7)));
  net->push_back("again", shared);
  net->push_back("twice", shared);
  torch::nn::ModuleList list(torch::nn::BatchNorm1d(2), torch::nn::Linear(2, 2));
  torch::nn::ModuleDict dict(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
      {"deep", torch::nn::BatchNorm3d(5).ptr()}});
  struct Outer : torch::nn::Module {};
  auto outer = std::make_shared<Outer>();
  outer->register_module("net", net);
  outer->register_module("list", list);
  outer->register_module("dict", dict);
  net->ptr(1)->as<torch::nn::BatchNorm2dImpl>()->running_mean.fill_(3);
  list->ptr(0)->eval();
  const auto before = outer->named_parameters();
  const auto buffers = outer->named_buffers();
  const at::Tensor x = drawn(1, {2, 3, 2, 2});

  convert_sync_batchnorm(outer);
  const auto* const norm = net->ptr(1)->as<SyncBatchNormImpl>();
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->options.momentum(), 0.7);
  EXPECT_EQ(net->ptr(2), net->ptr(3));
  EXPECT_NE(net->ptr(2)->as<SyncBatchNormImpl>(), nullptr);
  ASSERT_NE(list->ptr(0)->as<SyncBatchNormImpl>(), nullptr);
  EXPECT_FALSE(list->ptr(0)->is_training());
  EXPECT_NE(dict["deep"]->as<SyncBatchNormImpl>(), nullptr);
  const auto after = outer->named_parameters();
  ASSERT_EQ(after.keys(), before.keys());
  for (const auto& item : after) EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
  ASSERT_EQ(outer->named_buffers().keys(), buffers.keys());
  for (const auto& item : outer->named_buffers())
    EXPECT_TRUE(item.value().is_alias_of(buffers[item.key()])) << item.key();

  torch::nn::BatchNorm2d like(torch::nn::BatchNormOptions(4).momentum(0.7));
  EXPECT_EQ(net->forward(x).sizes(), (std::vector<std::int64_t>{2, 4, 2, 2}));
  EXPECT_NE(norm->running_mean[0].item<float>(), 3) << "the new layer is the one that runs";
  std::ostringstream out;
  out << *norm;
  EXPECT_NE(out.str().find("lockstep::SyncBatchNorm(4"), std::string::npos) << out.str();
}

TEST(ConvertSyncBatchNorm, NamesTheLayersThatItCannotReplaceAndChangesNothing) {
  struct Own : torch::nn::Module {
    Own() {
      norm = register_module("norm", torch::nn::BatchNorm1d(2));
      rest = register_module("rest", torch::nn::Sequential(torch::nn::BatchNorm1d(2)));
    }
    torch::nn::BatchNorm1d norm{nullptr};
    torch::nn::Sequential rest{nullptr};
  };
  auto own = std::make_shared<Own>();
  const auto words = refusal([&] { convert_sync_batchnorm(own); });
  EXPECT_NE(words.find(": norm. Declare"), std::string::npos) << words;
  EXPECT_EQ(own->rest->ptr(0)->as<SyncBatchNormImpl>(), nullptr);
  EXPECT_NE(refusal([] { convert_sync_batchnorm(torch::nn::BatchNorm1d(2)); }).find("the module itself"),
            std::string::npos);
}

TEST(ConvertSyncBatchNorm, AClonedLayerHasTensorsOfItsOwn) {
  SyncBatchNorm norm(kChannels);
  norm->running_mean.fill_(2);
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(torch::equal(copy->running_mean, norm->running_mean));
  EXPECT_FALSE(copy->weight.is_alias_of(norm->weight));
}

}  // namespace
}  // namespace lockstep
