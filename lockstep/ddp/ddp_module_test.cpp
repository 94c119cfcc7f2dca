// The wrapper as a torch::nn::Module: saved, loaded, cloned, profiled.
#include <ATen/record_function.h>

#include <atomic>
#include <sstream>
#include <string_view>

#include "lockstep/base/log.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_script.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

int ranges = 0;  // of one thread

TEST(DdpModule, ProfilersSeeTheForwardPass) {
  run_threads(1, [](int) {
    DistributedDataParallel model{Mlp()};
    model->forward(input_of(0, 0));
    const auto handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call)
                                                                  -> std::unique_ptr<at::ObserverContext> {
                                     if (std::string_view(call.name()) == "DistributedDataParallel.forward")
                                       ++ranges;
                                     return nullptr;
                                   }).scopes({at::RecordScope::FUNCTION}));
    for (int i = 0; i < 3; ++i) model->forward(input_of(0, 0));
    at::removeCallback(handle);
    model->forward(input_of(0, 0));
  });
  EXPECT_EQ(ranges, 3);
}

TEST(DdpModule, TrainAndEvalReachTheModule) {
  run_threads(1, [](int) {
    Mlp net;
    DistributedDataParallel model(net);
    model->eval();
    EXPECT_FALSE(net->second->is_training());
    model->train();
    EXPECT_TRUE(net->second->is_training());
  });
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    line = register_module("line", torch::nn::Linear(kIn, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(line(x)); }
  torch::nn::Linear line{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

void step(DistributedDataParallel<NormImpl>& model, int number, int rank) {
  torch::optim::SGD sgd(model->parameters(), 0.1);
  model->forward(input_of(number, rank)).square().sum().backward();
  sgd.step();
  model->zero_grad();
}

TEST(DdpModule, GoesOnFromAFileAsIfNothingHadHappened) {
  PerRank<std::vector<at::Tensor>> ends;
  run_threads(2, [&](int rank) {
    auto net = std::make_shared<NormImpl>();
    fill_parameters(*net, 1);
    DistributedDataParallel model(net);
    step(model, 0, rank);
    std::stringstream file;
    torch::save(model, file);
    step(model, 1, rank);

    auto fresh = std::make_shared<NormImpl>();
    fill_parameters(*fresh, 9);
    DistributedDataParallel loaded(fresh);
    step(loaded, 5, rank);  // its reducer has lived already
    torch::load(loaded, file);
    step(loaded, 1, rank);
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(item.key().starts_with("module.")) << item.key();
      EXPECT_TRUE(torch::equal(item.value(), loaded->named_parameters()[item.key()])) << item.key();
    }
    for (const auto& item : model->named_buffers()) {
      EXPECT_TRUE(torch::equal(item.value(), loaded->named_buffers()[item.key()])) << item.key();
    }
    ends.put(rank, loaded->parameters());
  });
  expect_same_bits(ends);
}

TEST(DdpModule, AParameterWhoseDataAreReplacedIsAveragedAsTheOthers) {
  run_threads(2, [](int rank) {
    Mlp net;
    DistributedDataParallel model(net);
    std::stringstream file;
    torch::save(net->second, file);
    for (int number = 0; number < 3; ++number) {
      model->forward(input_of(number, rank)).sum().backward();
      for (const at::Tensor& parameter : net->parameters()) {
        at::Tensor highest = parameter.grad().clone();
        all_reduce(highest, {.op = ReduceOp::kMax});
        EXPECT_TRUE(torch::equal(highest, parameter.grad())) << number;
      }
      model->zero_grad();
      file.seekg(0);
      torch::load(net->second, file);  // one layer of three
    }
  });
}

TEST(DdpModule, DelayedGradientsAreAveragedAfterALoadToo) {
  run_threads(2, [](int rank) {
    Mlp net;
    DistributedDataParallel model(net, {.delay_all_reduce_named_params = {"first.weight", "first.bias"},
                                        .param_to_hook_all_reduce = "first.weight"});
    std::stringstream file;
    torch::save(model, file);
    torch::load(model, file);
    model->forward(input_of(0, rank)).sum().backward();
    for (const at::Tensor& parameter : net->parameters()) {
      at::Tensor highest = parameter.grad().clone();
      all_reduce(highest, {.op = ReduceOp::kMax});
      EXPECT_TRUE(torch::equal(highest, parameter.grad()));
    }
  });
}

TEST(DdpModule, SavedUnderTheNamesOfTheBareModuleWhenThatIsSaved) {
  run_threads(2, [](int) {
    auto net = std::make_shared<NormImpl>();
    DistributedDataParallel model(net);
    std::stringstream file;
    torch::save(model->module(), file);
    auto bare = std::make_shared<NormImpl>();
    torch::load(bare, file);
    EXPECT_TRUE(torch::equal(bare->line->weight, net->line->weight));
  });
}

TEST(DdpModule, ACloneIsAModelOfItsOwn) {
  run_threads(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(kIn, 4), torch::nn::Tanh(), torch::nn::Linear(4, 1));
    const Group group = new_group({0, 1});
    DistributedDataParallel model(net, {.group = group, .gradient_as_bucket_view = true});
    model->forward(input_of(0, rank)).sum().backward();
    DistributedDataParallel copy = model.clone();
    EXPECT_EQ(copy->group(), group);
    ASSERT_EQ(copy->parameters().size(), 4u);
    {
      torch::NoGradGuard no_grad;
      copy->parameters()[0].mul_(2);
    }
    EXPECT_FALSE(torch::equal(copy->parameters()[0], model->parameters()[0]));
    model->zero_grad();
    copy->forward(input_of(1, rank)).sum().backward();
    EXPECT_EQ(copy->stats().n_reductions, 1u);
    EXPECT_EQ(model->stats().n_reductions, 1u);
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    at::Tensor highest = copy->parameters()[0].grad().clone();
    all_reduce(highest, {.op = ReduceOp::kMax, .group = group});
    EXPECT_TRUE(torch::equal(highest, copy->parameters()[0].grad()));
  });
}

TEST(DdpModule, ACloneOfAScriptTrainsToo) {
  run_threads(2, [](int rank) {
    torch::jit::Module net("net");
    net.register_parameter("weight", drawn(1, {kIn}).set_requires_grad(true), false);
    net.define("def forward(self, x):\n  return x * self.weight\n");
    DistributedDataParallel model(net);
    DistributedDataParallel copy = model.clone();
    const at::Tensor x = input_of(0, rank);
    model(x).toTensor().sum().backward();
    copy(x).toTensor().sum().backward();
    EXPECT_FALSE(copy->parameters()[0].is_same(model->parameters()[0]));
    EXPECT_TRUE(torch::equal(copy->parameters()[0].grad(), model->parameters()[0].grad()));
  });
}

TEST(DdpModule, SaysWhyAModuleCannotBeCloned) {
  run_threads(1, [](int) {
    DistributedDataParallel model{Mlp()};
    const std::string words = refusal([&] { model.clone(); });
    EXPECT_NE(words.find("cannot be cloned"), std::string::npos) << words;
    EXPECT_NE(words.find("Cloneable"), std::string::npos) << words;
  });
}

}  // namespace
}  // namespace lockstep
