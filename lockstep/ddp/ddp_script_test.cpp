// TorchScript modules and AnyModule behind DistributedDataParallel.

#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_script.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

at::Tensor weight_of(std::uint64_t seed, at::IntArrayRef sizes) {
  return (0.3 * drawn(seed, sizes)).set_requires_grad(true);
}

// Two linear layers, the second in a submodule.
torch::jit::Module scripted_mlp(std::uint64_t seed) {
  torch::jit::Module head("head");
  head.register_parameter("weight", weight_of(seed + 2, {kOut, 8}), false);
  head.define("def forward(self, x):\n  return torch.matmul(x, self.weight.t())\n");
  torch::jit::Module net("net");
  net.register_parameter("weight", weight_of(seed, {8, kIn}), false);
  net.register_parameter("bias", weight_of(seed + 1, {8}), false);
  net.register_module("head", head);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.define(
      "def forward(self, x):\n  return self.head.forward(torch.tanh(torch.matmul(x, self.weight.t()) + "
      "self.bias))\n");
  return net;
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter);
  return all;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

TEST(Script, TrainsLikeOneProcess) {
  constexpr int kRanks = 3;
  torch::jit::Module alone = scripted_mlp(1);
  torch::optim::SGD sgd(parameters_of(alone), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    loss_of(alone.forward({batch_input(step, kRanks)}).toTensor(), batch_target(step, kRanks)).backward();
    sgd.step();
  }
  PerRank<std::vector<at::Tensor>> trained;
  run_threads(kRanks, [&](int rank) {
    torch::jit::Module net = scripted_mlp(rank == 0 ? 1 : 50);
    auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = true});
    torch::optim::SGD mine(model->parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      mine.zero_grad();
      const at::Tensor x = batch_input(step, kRanks).narrow(0, rank * kBatch, kBatch);
      const at::Tensor y = batch_target(step, kRanks).narrow(0, rank * kBatch, kBatch);
      loss_of(model(x).toTensor(), y).backward();
      mine.step();
    }
    EXPECT_EQ(model->stats().n_reductions, static_cast<std::uint64_t>(kSteps));
    trained.put(rank, detached(parameters_of(net)));
  });
  expect_same_bits(trained);
  expect_close(trained.values().at(0), detached(parameters_of(alone)));
}

TEST(Script, ItsTensorsAreThoseOfTheWrapper) {
  run_threads(2, [](int) {
    torch::jit::Module net = scripted_mlp(1);
    auto model = DistributedDataParallel(net);
    const auto named = model->named_parameters();
    ASSERT_EQ(named.size(), 3u);
    EXPECT_TRUE(named["module.weight"].is_same(net.attr("weight").toTensor()));
    EXPECT_TRUE(named["module.head.weight"].is_same(net.attr("head").toModule().attr("weight").toTensor()));
    model->eval();
    EXPECT_FALSE(net.is_training());
    model->train();
    EXPECT_TRUE(net.is_training());
    std::stringstream file;
    torch::save(model, file);
    const at::Tensor before = named["module.bias"].detach().clone();
    {
      torch::NoGradGuard no_grad;
      named["module.bias"].zero_();
    }
    torch::load(model, file);
    EXPECT_TRUE(torch::equal(net.attr("bias").toTensor(), before));
  });
}

// `count` is bound to a new tensor in every pass.
TEST(Script, BuffersThatItsCodeRebindsAreFoundAgain) {
  run_threads(2, [](int rank) {
    torch::jit::Module net("counter");
    net.register_parameter("weight", weight_of(1, {kIn}), false);
    net.register_buffer("count", torch::zeros({1}));
    net.define("def forward(self, x, by: int):\n  self.count = self.count + by\n  return x * self.weight\n");
    auto model = DistributedDataParallel(net);
    for (int step = 0; step < 2; ++step)
      model->forward(input_of(step, rank), rank == 0 ? 1 : 10).toTensor().sum().backward();
    // Rank 0's count after the first pass, sent before the second, and what the second added here.
    const float expected = rank == 0 ? 2 : 11;
    EXPECT_EQ(net.attr("count").toTensor().item<float>(), expected);
    EXPECT_EQ(model->named_buffers()["module.count"].item<float>(), expected);
  });
}

torch::jit::Module two_headed() {
  torch::jit::Module net("heads");
  net.register_parameter("left", weight_of(1, {kIn}), false);
  net.register_parameter("right", weight_of(2, {kIn}), false);
  net.define(R"(
def forward(self, x, which: int):
  out: Dict[str, Tuple[Tensor, List[Tensor]]] = {}
  if which == 0:
    out["one"] = (x * self.left, [x])
  else:
    out["one"] = (x, [x * self.right])
  return out
)");
  return net;
}

TEST(Script, UnusedParametersAreFoundThroughDictsTuplesAndLists) {
  run_threads(2, [](int rank) {
    torch::jit::Module net = two_headed();
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      const c10::IValue output = model->forward(torch::ones({kIn}), (rank + step) % 2);
      at::Tensor loss;
      visit_tensors(output, [&](at::Tensor& tensor) {
        if (tensor.requires_grad()) loss = tensor.sum();
      });
      loss.backward();
      for (const char* name : {"left", "right"}) {
        const at::Tensor parameter = net.attr(name).toTensor();
        EXPECT_TRUE(torch::allclose(parameter.grad(), torch::full({kIn}, 0.5))) << name << parameter.grad();
        parameter.mutable_grad().reset();
      }
    }
  });
}

TEST(Script, SparseLayersAreRecognised) {
  run_threads(2, [](int rank) {
    torch::jit::Module table("table");
    table.register_parameter("weight", weight_of(1, {4, 2}), false);
    table.register_attribute("sparse", c10::BoolType::get(), true);
    table.define("def forward(self, i):\n  return torch.embedding(self.weight, i, -1, False, self.sparse)\n");
    auto model = DistributedDataParallel(table);
    model->forward(torch::tensor({rank})).toTensor().sum().backward();
    const at::Tensor gradient = model->parameters().front().grad();
    ASSERT_TRUE(gradient.is_sparse());
    const at::Tensor expected = torch::tensor({0.5, 0.5, 0.0, 0.0}).unsqueeze(1).expand({4, 2});
    EXPECT_TRUE(torch::allclose(gradient.to_dense(), expected.to(at::kFloat)));
  });
}

TEST(Script, AnEmptyModuleIsRefused) {
  run_threads(1, [](int) {
    EXPECT_NE(refusal([] { DistributedDataParallel model{torch::jit::Module()}; }).find("is empty"),
              std::string::npos);
  });
}

TEST(AnyModule, TrainsLikeTheModuleInIt) {
  run_threads(2, [](int rank) {
    Mlp plain;
    fill_parameters(*plain, 1);
    Mlp hidden;
    fill_parameters(*hidden, 1);
    auto expected = DistributedDataParallel(plain);
    auto model = DistributedDataParallel(torch::nn::AnyModule(hidden));
    const at::Tensor x = input_of(0, rank);
    expected->forward(x).sum().backward();
    model->forward(x).sum().backward();
    ASSERT_EQ(model->parameters().size(), 5u);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_TRUE(torch::equal(hidden->parameters()[i].grad(), plain->parameters()[i].grad()));
    }
  });
}

struct PairNet : torch::nn::Module {
  PairNet() { weight = register_parameter("weight", torch::ones({2})); }
  std::pair<at::Tensor, int> forward(at::Tensor x, int times) { return {x * weight * times, times}; }
  at::Tensor weight;
};

TEST(AnyModule, GivesBackWhatItIsAskedFor) {
  run_threads(2, [](int rank) {
    torch::nn::AnyModule any(PairNet{});
    auto model = DistributedDataParallel(any, {.find_unused_parameters = true});
    auto [y, times] = model->forward<std::pair<at::Tensor, int>>(torch::ones({2}), rank + 1);
    EXPECT_EQ(times, rank + 1);
    y.sum().backward();
    EXPECT_TRUE(torch::allclose(model->parameters()[0].grad(), torch::full({2}, 1.5)));
    EXPECT_NE(refusal([] { DistributedDataParallel empty{torch::nn::AnyModule()}; }).find("null"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
