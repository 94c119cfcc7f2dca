// DDP under distributed autograd gives the gradients that it gives under backward(): in the context, and not
// in Tensor::grad(). Workers are processes.
#include <gtest/gtest.h>

#include "tests/rpc_scenario/scenario.h"

namespace lockstep::scenario {
namespace {

constexpr int kWorkers = 4;

// One forward and backward pass by distributed autograd, one by autograd: the same gradients.
template <class Model, class... Input>
void compare(Model& model, Delays& delay, const Input&... input) {
  model->zero_grad();
  autograd::Gradients gradients;
  {
    const autograd::DistAutogradContext context;
    delay();
    const at::Tensor loss = model->forward(input...).norm();
    delay();
    autograd::backward(context, {loss});
    gradients = context.gradients();
  }
  for (const auto& parameter : model->parameters())
    require(!parameter.grad().defined(), "Tensor::grad() was written");
  delay();
  model->forward(input...).norm().backward();
  require(gradients.size() == model->parameters().size(), "one gradient for each parameter");
  for (const auto& [name, parameter] : model->named_parameters().pairs())
    require_equal(gradients.find(parameter), parameter.grad(), name);
}

void in_a_group(const std::function<void(int rank)>& body) {
  run_workers(
      kWorkers,
      [&](int rank, const Meeting& meeting) {
        enter_group(rank, kWorkers, meeting);
        torch::manual_seed(rank);
        body(rank);
        destroy_process_group();
      },
      "_pg");
}

TEST(RpcScenario, GradientsOfTheContextAreThoseOfBackward) {
  in_a_group([](int rank) {
    Delays delay(rank);
    for (const bool views : {false, true}) {
      for (const std::size_t in_place_bytes : {std::size_t{1}, std::size_t{1} << 20}) {
        auto model = DistributedDataParallel(
            torch::nn::Linear(2, 3), {.gradient_as_bucket_view = views, .in_place_bytes = in_place_bytes});
        join({*model},
             [&] {
               compare(model, delay, torch::rand({3, 2}));
             },
             {.divide_by_initial_world_size = false});
        for (int step = 0; step < 3; ++step) compare(model, delay, torch::rand({3, 2}));
      }
    }
  });
}

TEST(RpcScenario, GradientsOfTheContextAreThoseOfBackwardWhenInputsAreUneven) {
  in_a_group([](int rank) {
    Delays delay(rank);
    auto model = DistributedDataParallel(torch::nn::Linear(2, 3));
    for (int round = 0; round < 50; ++round) {
      join({*model},
           [&] {
             const int n_inputs = rank % 2 == 0 ? 3 : 1;
             for (int i = 0; i < n_inputs; ++i) compare(model, delay, torch::rand({3, 2}));
           },
           {.divide_by_initial_world_size = true});
    }
  });
}

TEST(RpcScenario, SparseGradientsAreInTheContextToo) {
  in_a_group([](int rank) {
    Delays delay(rank);
    auto model = DistributedDataParallel(
        torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(10, 3).sparse(true).mode(torch::kMean)));
    const at::Tensor input = torch::randint(10, {10});
    const at::Tensor offsets = torch::tensor({0, 4}, torch::kLong);
    const at::Tensor weight = model->parameters().front();
    model->forward(input, offsets).sum().backward();
    require(weight.grad().is_sparse(), "a sparse gradient");
    const autograd::DistAutogradContext context;
    autograd::backward(context, {model->forward(input, offsets).sum()});
    const auto gradients = context.gradients();
    require(gradients.size() == 1, "exactly one gradient");
    const at::Tensor gradient = gradients.find(weight);
    require(gradient.is_sparse(), "sparse in the context as well");
    require_equal(gradient.to_dense(), weight.grad().to_dense(), "the gradient");
  });
}

at::Tensor weight_gradient(const rpc::RRef<torch::nn::LinearImpl>& layer, const autograd::Context& context) {
  return context.gradients().find(layer.local_value().weight);
}
LOCKSTEP_RPC_FUNCTION(weight_gradient);

TEST(RpcScenario, ARemoteLayerAndDdpHaveTheGradientsOfALocalOne) {
  in_a_group([](int) {
    for (const auto* device : {"worker0/cpu", "worker0"}) {
      const rpc::RemoteModule<torch::nn::Linear> remote_layer(device, rpc::Args{10, 5, false});
      torch::nn::Linear layer1(torch::nn::LinearOptions(10, 5).bias(false));
      layer1->weight = remote_layer.remote_parameters().at(0).to_here();
      require(layer1->weight.requires_grad() && layer1->weight.is_leaf(), "a leaf of its own");
      torch::nn::Linear layer2(5, 1);
      auto model = DistributedDataParallel(layer2);
      const at::Tensor input = torch::rand({10, 10});
      model->forward(layer1->forward(input)).sum().backward();

      const autograd::DistAutogradContext context;
      autograd::backward(context, {model->forward(remote_layer.forward(input)).sum()});
      const auto gradients = context.gradients();
      barrier();
      require_equal(gradients.find(layer2->weight), layer2->weight.grad(), "of the layer in DDP");
      const at::Tensor there =
          rpc::rpc_sync("worker0", weight_gradient, {remote_layer.get_module_rref(), context});
      require_equal(there, layer1->weight.grad(), "of the remote layer");
    }
  });
}

TEST(RpcScenario, GradientsOfAnEarlierContextAndOfBackwardOutliveLaterPasses) {
  in_a_group([](int rank) {
    for (const bool views : {false, true}) {
      auto model = DistributedDataParallel(torch::nn::Linear(2, 1), {.gradient_as_bucket_view = views});
      const at::Tensor weight = model->parameters().front();
      const auto mean = [&](double scale) { return torch::full({1, 2}, scale * (kWorkers - 1) / 2.0); };
      const auto loss = [&](double scale) { return model->forward(torch::full({1, 2}, scale * rank)).sum(); };
      loss(1).backward();
      std::vector<at::Tensor> kept;
      for (int i = 2; i < 5; ++i) {
        const autograd::DistAutogradContext context;
        autograd::backward(context, {loss(i)});
        kept.push_back(context.gradients().find(weight));
      }
      require_equal(weight.grad(), mean(1), "of backward()");
      for (int i = 2; i < 5; ++i)
        require_equal(kept[static_cast<std::size_t>(i - 2)], mean(i), "of a context");
      loss(10).backward();
      require_equal(weight.grad(), mean(11), "backward() adds to its own");
    }
  });
}

}  // namespace
}  // namespace lockstep::scenario
