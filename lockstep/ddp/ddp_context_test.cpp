// DistributedDataParallel inside distributed autograd contexts: gradients are averaged in the context,
// Tensor::grad() is left alone. Ranks as threads that are workers too.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/autograd/autograd.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/optim/in_backward.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

constexpr int kRanks = 3;

// Each rank is a member of the default group and a worker.
void run(const std::function<void(int rank)>& body) {
  const auto store = std::make_shared<HashStore>();
  run_threads(kRanks, [&](int rank) {
    rpc::start("worker" + std::to_string(rank), {.rank = rank,
                                                 .world_size = kRanks,
                                                 .store = store->clone(),
                                                 .strict_rref_check = true,
                                                 .extensions = {autograd::extension}});
    body(rank);
    rpc::shutdown();
  });
}

at::Tensor doubled(const at::Tensor& x) {
  return x * 2;
}
LOCKSTEP_RPC_FUNCTION(doubled);

// Two layers, and one in between that another worker computes when `through` is set.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(4, 5));
    unused = register_module("unused", torch::nn::Linear(2, 2));
    last = register_module("last", torch::nn::Linear(5, 2));
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(0.25);
  }
  at::Tensor forward(const at::Tensor& x, int through, bool use_all) {
    at::Tensor hidden = first->forward(x);
    hidden = through < 0 ? hidden * 2 : rpc::rpc_sync(through, doubled, {hidden});
    const at::Tensor out = last->forward(hidden);
    return use_all ? out + unused->forward(out) : out;
  }
  torch::nn::Linear first{nullptr}, unused{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

at::Tensor input_of(int rank, int step) {
  return torch::full({2, 4}, 1.0 + rank + 10 * step);
}

// The mean of what all ranks would compute alone.
std::vector<at::Tensor> mean_gradients(int step, bool use_all) {
  Net net;
  for (int rank = 0; rank < kRanks; ++rank) net->forward(input_of(rank, step), -1, use_all).sum().backward();
  std::vector<at::Tensor> means;
  for (const auto& parameter : net->parameters())
    means.push_back(parameter.grad().defined() ? parameter.grad() / kRanks : at::Tensor());
  return means;
}

void expect_gradients(const autograd::Gradients& gradients, const std::vector<at::Tensor>& parameters,
                      const std::vector<at::Tensor>& expected) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = gradients.find(parameters[i]);
    ASSERT_EQ(gradient.defined(), expected[i].defined()) << i;
    if (gradient.defined()) {
      EXPECT_TRUE(torch::allclose(gradient, expected[i])) << i << gradient << expected[i];
    }
  }
}

// Contexts, with a pass of backward() between them, whose gradients must stay as they are.
void expect_averages_in_contexts(const DdpOptions& options, bool use_all) {
  run([&](int rank) {
    auto model = DistributedDataParallel(Net(), options);
    const auto parameters = model->parameters();
    std::vector<autograd::Gradients> kept;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) model->forward(input_of(rank, 7), -1, use_all).sum().backward();
      const autograd::DistAutogradContext context;
      const int through = step == 0 ? -1 : (rank + step) % kRanks;
      autograd::backward(context, {model->forward(input_of(rank, step), through, use_all).sum()});
      kept.push_back(context.gradients());
    }
    for (int step = 0; step < 4; ++step)
      expect_gradients(kept[static_cast<std::size_t>(step)], parameters, mean_gradients(step, use_all));
    const auto of_backward = mean_gradients(7, use_all);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_EQ(parameters[i].grad().defined(), of_backward[i].defined()) << i;
      if (of_backward[i].defined()) {
        EXPECT_TRUE(torch::allclose(parameters[i].grad(), of_backward[i])) << i;
      }
    }
  });
}

TEST(DdpInContext, AveragesTheContextsGradients) {
  for (const bool views : {false, true}) {
    for (const std::size_t in_place : {std::size_t{1}, std::size_t{1} << 30}) {
      SCOPED_TRACE(views ? "views" : "copies");
      expect_averages_in_contexts(
          {.bucket_cap_mb = 0.00005, .gradient_as_bucket_view = views, .in_place_bytes = in_place}, true);
    }
  }
}

TEST(DdpInContext, LeavesUnusedParametersWithoutAGradient) {
  for (const bool views : {false, true}) {
    for (const std::size_t in_place : {std::size_t{1}, std::size_t{1} << 30}) {
      expect_averages_in_contexts(
          {.find_unused_parameters = true, .gradient_as_bucket_view = views, .in_place_bytes = in_place},
          false);
      expect_averages_in_contexts(
          {.gradient_as_bucket_view = views, .in_place_bytes = in_place, .static_graph = true}, false);
    }
  }
}

TEST(DdpInContext, RunsCommunicationHooks) {
  run([](int rank) {
    auto model = DistributedDataParallel(Net());
    model->register_comm_hook(fp16_compress_hook({.group = default_group()}));
    const autograd::DistAutogradContext context;
    autograd::backward(context, {model->forward(input_of(rank, 0), (rank + 1) % kRanks, true).sum()});
    const auto means = mean_gradients(0, true);
    const auto gradients = context.gradients();
    std::size_t i = 0;
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(torch::allclose(gradients.find(parameter), means[i++], 1e-2, 1e-2));
      EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

TEST(DdpInContext, AccumulatesInsideNoSync) {
  run([](int rank) {
    auto model = DistributedDataParallel(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)));
    const at::Tensor weight = model->parameters().front();
    const autograd::DistAutogradContext context;
    {
      const auto no_sync = model->no_sync();
      autograd::backward(context, {model->forward(torch::full({1, 1}, 1.0 * rank)).sum()});
    }
    EXPECT_EQ(context.gradients().find(weight).item<float>(), static_cast<float>(rank));
    autograd::backward(context, {model->forward(torch::full({1, 1}, 10.0 * rank)).sum()});
    EXPECT_EQ(context.gradients().find(weight).item<float>(), 11.0F);
    EXPECT_FALSE(weight.grad().defined());
  });
}

TEST(DdpInContext, JoinsUnevenInputs) {
  run([](int rank) {
    for (const bool through : {false, true}) {
      auto model = DistributedDataParallel(Net());
      int n = 0;
      join({*model}, [&] {
        for (; n <= rank; ++n) {
          const autograd::DistAutogradContext context;
          autograd::backward(
              context, {model->forward(input_of(rank, n), through ? (rank + 1) % kRanks : -1, true).sum()});
          const at::Tensor bias = model->module()->last->bias;
          // Every rank with input adds 2 twice (its own path and the one through the unused layer: 2 * 0.25 *
          // 2).
          const double share = static_cast<double>(kRanks - n) / kRanks;
          EXPECT_TRUE(torch::allclose(context.gradients().find(bias), torch::full({2}, 3.0 * share)));
        }
      });
    }
  });
}

// Ranks that exhaust their input keep participating with zero contributions, without the others' contexts.
TEST(DdpInContext, LeavesTheGradientsOfRanksWithoutInputAlone) {
  run([](int rank) {
    for (const bool views : {false, true}) {
      for (const bool before : {false, true}) {
        auto model = DistributedDataParallel(Net(), {.gradient_as_bucket_view = views});
        if (before) model->forward(input_of(rank, 0), -1, true).sum().backward();
        join({*model}, [&] {
          for (int n = 0; n < rank; ++n) {
            const autograd::DistAutogradContext context;
            autograd::backward(context, {model->forward(input_of(rank, 1 + n), -1, true).sum()});
          }
        });
        const auto parameters = model->parameters();
        const auto expected = mean_gradients(0, true);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const at::Tensor gradient = parameters[i].grad();
          EXPECT_EQ(gradient.defined(), before) << i << (views ? ", views" : "");
          if (before && gradient.defined()) {
            EXPECT_TRUE(torch::allclose(gradient, expected[i])) << i;
          }
        }
      }
    }
  });
}

TEST(DdpInContext, LetsOptimizersStepInsideTheBackwardPass) {
  run([](int rank) {
    auto model = DistributedDataParallel(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)));
    const at::Tensor weight = model->parameters().front();
    const auto steps =
        apply_optimizer_in_backward<torch::optim::SGD>({weight}, torch::optim::SGDOptions(1.0));
    const double before = weight.item<double>();
    const autograd::DistAutogradContext context;
    autograd::backward(context, {model->forward(torch::full({1, 1}, 1.0 * rank)).sum()});
    EXPECT_NEAR(weight.item<double>(), before - 1.0, 1e-6);
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_FALSE(context.gradients().contains(weight)) << "used up";
  });
}

TEST(DdpInContext, FollowsOwnedRRefsInOutputs) {
  struct Wrapped : torch::nn::Module {
    Wrapped()
        : a(register_module("a", torch::nn::Linear(1, 1))),
          b(register_module("b", torch::nn::Linear(1, 1))) {}
    rpc::RRef<at::Tensor> forward(const at::Tensor& x, bool use_b) {
      return rpc::RRef<at::Tensor>(use_b ? b->forward(x) : a->forward(x));
    }
    torch::nn::Linear a, b;
  };
  run([](int rank) {
    auto model = DistributedDataParallel(std::make_shared<Wrapped>(), {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      const auto output = model->forward(torch::full({1, 1}, 1.0 * rank), step % 2 != 0);
      model->zero_grad();
      output.local_value().sum().backward();
      const auto& used = step % 2 != 0 ? model->module()->b : model->module()->a;
      const auto& other = step % 2 != 0 ? model->module()->a : model->module()->b;
      EXPECT_EQ(used->weight.grad().item<float>(), 1.0F);
      EXPECT_FALSE(other->weight.grad().defined());
    }
  });
}

TEST(DdpInContext, RefusesDelayedReductions) {
  run([](int rank) {
    const Net net;
    auto model = DistributedDataParallel(
        net, {.delay_all_reduce_named_params = {"last.weight"}, .param_to_hook_all_reduce = "first.weight"});
    const autograd::DistAutogradContext context;
    const at::Tensor loss = model->forward(input_of(rank, 0), -1, true).sum();
    EXPECT_THROW(autograd::backward(context, {loss}), Error);
  });
}

}  // namespace
}  // namespace lockstep
