// Modules on other workers, workers as threads.
#include "lockstep/remote/remote_module.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include <atomic>

#include "lockstep/remote/remote_testing.h"

namespace lockstep::rpc {
namespace {

using testing::caught;
using testing::on_first;
using testing::says;

std::atomic<int> n_alive{0};

// Scales, and says where it is.
struct ScalerImpl : torch::nn::Module {
  ScalerImpl(int width, double scale, const std::string& word) : word_(word) {
    if (width < 1) throw std::invalid_argument("a width of at least 1");
    weight_ = register_parameter("weight", at::ones({width}) * scale);
    inner_ = register_module("inner", torch::nn::Linear(width, 1));
    ++n_alive;
  }
  ~ScalerImpl() override { --n_alive; }
  at::Tensor forward(const at::Tensor& x, const std::optional<double>& extra) {
    return x * weight_ * extra.value_or(1.0);
  }
  std::string place() const { return word_ + " on " + current_agent("test")->self().name; }

  at::Tensor weight_;
  torch::nn::Linear inner_{nullptr};
  const std::string word_;
};
TORCH_MODULE(Scaler);
LOCKSTEP_RPC_MODULE(Scaler, int, double, std::string);
LOCKSTEP_RPC_METHOD(&ScalerImpl::place);

struct UnknownImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

at::Tensor twice_through(const RemoteModule<Scaler>& module, const at::Tensor& x) {
  return module.forward(module.forward(x));
}
LOCKSTEP_RPC_FUNCTION(twice_through);

TEST(RemoteModule, RunsWhereItWasMade) {
  on_first(3, [] {
    const at::Tensor x = at::rand({2, 3});
    for (const auto* device : {"worker1/cpu", "worker1", "rank:1/cpu", "rank:1"}) {
      const RemoteModule<Scaler> module(device, Args{3, 2.0, "here"});
      EXPECT_TRUE(at::equal(module.forward(x), x * 2)) << device;
      EXPECT_TRUE(at::equal(module.forward_async(x, 1.5).wait(), x * 3)) << "its own signature";
      EXPECT_EQ(module.get_module_rref().rpc_sync(&ScalerImpl::place), "here on worker1");
      EXPECT_EQ(module.device(), "cpu");
    }
    const RemoteModule<ScalerImpl> own("cpu", Args{3, 2.0, "here"});
    EXPECT_TRUE(own.get_module_rref().is_owner()) << "a device alone is this worker's";
    EXPECT_TRUE(at::equal(own.forward(x), x * 2));
  });
  EXPECT_EQ(n_alive, 0);
}

TEST(RemoteModule, TakesNumbersOfAnyWidth) {
  on_first(2, [] {
    const RemoteModule<Scaler> module("worker1", Args{std::int64_t{3}, 2.0F, std::string("here")});
    EXPECT_TRUE(at::equal(module.forward(at::ones({3})), at::ones({3}) * 2));
    const RemoteModule<Scaler> huge("worker1", Args{std::int64_t{1} << 40, 2.0, "here"});
    EXPECT_TRUE(says(caught([&] { huge.forward(at::ones({3})); }), "out of range"));
  });
}

TEST(RemoteModule, ShowsItsParametersWhereTheyAre) {
  on_first(2, [] {
    const RemoteModule<Scaler> module("worker1", Args{3, 2.0, "here"});
    const auto all = module.remote_parameters();
    ASSERT_EQ(all.size(), 3u);
    EXPECT_EQ(module.remote_parameters(/*recurse=*/false).size(), 1u);
    EXPECT_EQ(all[0].owner_name(), "worker1");
    EXPECT_TRUE(at::equal(all[0].to_here(), at::ones({3}) * 2));
  });
}

TEST(RemoteModule, CanBeSentToOtherWorkers) {
  on_first(3, [] {
    const RemoteModule<Scaler> module("worker1", Args{3, 2.0, "here"});
    EXPECT_TRUE(at::equal(rpc_sync("worker2", twice_through, {module, at::ones({3})}), at::ones({3}) * 4));
    EXPECT_TRUE(at::equal(rpc_sync("worker1", twice_through, {module, at::ones({3})}), at::ones({3}) * 4));
  });
}

TEST(RemoteModule, MayBeMadeFromAModuleThatIsThere) {
  on_first(2, [] {
    const RemoteModule<Scaler> first("worker1", Args{3, 2.0, "here"});
    const auto second = RemoteModule<Scaler>::init_from_module_rref("worker1/cpu", first.get_module_rref());
    EXPECT_TRUE(at::equal(second.forward(at::ones({3})), at::ones({3}) * 2));
    EXPECT_EQ(second.get_module_rref(), first.get_module_rref());
    EXPECT_TRUE(says(
        caught([&] { RemoteModule<Scaler>::init_from_module_rref("worker0/cpu", first.get_module_rref()); }),
        "worker1, which owns the module"));
  });
}

TEST(RemoteModule, ReportsWhatWentWrong) {
  on_first(2, [] {
    EXPECT_TRUE(says(caught([] {
                       RemoteModule<Scaler>("worker1/", Args{3, 2.0, "x"});
                     }),
                     "is not a remote device"));
    EXPECT_TRUE(says(caught([] {
                       RemoteModule<Scaler>("nobody", Args{3, 2.0, "x"});
                     }),
                     "no worker named \"nobody\""));
    const RemoteModule<Scaler> narrow("worker1", Args{0, 2.0, "x"});
    EXPECT_TRUE(says(caught([&] { narrow.forward(at::ones({3})); }), "a width of at least 1"));
    const RemoteModule<Scaler> other_types("worker1", Args{"three", 2.0, "x"});
    EXPECT_TRUE(says(caught([&] { other_types.forward(at::ones({3})); }), "expected i64, got text"));
    const RemoteModule<UnknownImpl> unknown("worker1");
    EXPECT_THROW(unknown.forward(at::ones({3})), Error);
  });
}

template <class T>
concept HasParameters = requires(T& module) {
  module.parameters();
};
static_assert(HasParameters<ScalerImpl> && !HasParameters<RemoteModule<Scaler>>,
              "other methods are not there");

TEST(RemoteModule, KnowsModulesOfLibtorch) {
  on_first(2, [] {
    const at::Tensor x = at::rand({4, 3});
    const RemoteModule<torch::nn::Linear> linear("worker1", Args{3, 2, false});
    ASSERT_EQ(linear.remote_parameters().size(), 1u);
    EXPECT_TRUE(at::allclose(linear.forward(x), x.matmul(linear.remote_parameters()[0].to_here().t())));
    const RemoteModule<torch::nn::EmbeddingBag> bag("worker1", Args{10, 3, "mean", true});
    EXPECT_EQ(bag.forward(torch::tensor({1, 2, 3}), torch::tensor({0, 2})).size(0), 2);
    const RemoteModule<torch::nn::EmbeddingBag> odd("worker1", Args{10, 3, "median", true});
    EXPECT_TRUE(says(caught([&] { odd.forward(torch::tensor({1})); }), "not \"median\""));
    const RemoteModule<torch::nn::Embedding> embedding("worker1", Args{10, 3, false});
    EXPECT_EQ(embedding.forward(torch::tensor({1, 2})).size(1), 3);
    const RemoteModule<torch::nn::LSTM> lstm("worker1", Args{3, 5, 1});
    const auto [output, state] = lstm.forward(at::rand({2, 1, 3}));
    EXPECT_EQ(output.size(2), 5);
    EXPECT_EQ(std::get<0>(lstm.forward(at::rand({2, 1, 3}), state)).size(2), 5);
  });
}

}  // namespace
}  // namespace lockstep::rpc
