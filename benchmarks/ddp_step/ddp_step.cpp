// A training step with DistributedDataParallel beside the same step without: rank processes with one thread
// each, all modes in the same processes. "local" is what the machine gives while all ranks step at once and
// nobody talks.
#include <ATen/Parallel.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/join_world.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/common/shared_array.h"
#include "benchmarks/ddp_step/malloc_thresholds.h"
#include "benchmarks/ddp_step/models.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/optim.h"

namespace bench {
namespace {

struct RankResult {
  double us = 0;
  double parameter_sum = 0;  // the same bits on every rank after a step with DDP
};

// What a mode needs beside the parameters, on one rank.
struct Memory {
  std::size_t gradients = 0;  // bytes that lie in .grad
  std::size_t extra = 0;      // buckets, unless the gradients lie in them
  std::size_t state = 0;      // the optimizer's
};

struct Training {
  std::function<double()> step;
  std::vector<at::Tensor> parameters{};
  std::shared_ptr<torch::optim::Optimizer> optimizer{};
  std::function<std::size_t()> held_bytes = [] { return std::size_t{0}; };  // by DDP, beside the gradients
};

std::size_t state_bytes(const torch::optim::Optimizer& optimizer) {
  std::size_t sum = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto* const adam = dynamic_cast<const torch::optim::AdamParamState*>(state.get());
    if (adam != nullptr) sum += adam->exp_avg().nbytes() + adam->exp_avg_sq().nbytes();
  }
  return sum;
}

Memory memory_of(const Training& training) {
  Memory memory;
  std::map<const void*, std::size_t> storages;
  for (const at::Tensor& parameter : training.parameters) {
    const at::Tensor& gradient = parameter.grad();
    memory.gradients += gradient.nbytes();
    storages[gradient.storage().data()] = gradient.storage().nbytes();
  }
  std::size_t held = 0;
  for (const auto& [data, n_bytes] : storages) held += n_bytes;
  // The storages of gradients that lie in buckets are the buckets.
  memory.extra = held - memory.gradients + training.held_bytes();
  memory.state = state_bytes(*training.optimizer);
  return memory;
}

class DdpStep {
 public:
  DdpStep(Link& link, SharedArray<RankResult>& results) : link_(link), results_(results) {}

  std::string measure(const Request& request) {
    const std::string& mode = request.text("mode");
    prepare(shape_of(request));
    Training& training = training_of(mode);
    warm_up(training);
    const std::int64_t n = steps_for(training, request.number("budget_ms") * 1'000'000);
    std::vector<double> us;
    for (std::int64_t k = 0; k < n; ++k) us.push_back(timed(training));
    results_[static_cast<std::size_t>(link_.rank())] = {median(us), parameter_sum(training)};
    link_.all(true);
    return link_.rank() == 0 ? answer(mode, n, memory_of(training)) : "";
  }

 private:
  // Models of one size at a time: the largest takes a gigabyte in its modes.
  void prepare(const Shape& shape) {
    if (shape == shape_) return;
    trainings_.clear();
    shape_ = shape;
    torch::manual_seed(100 + link_.rank());  // every rank its own batch, as in training
    input_ = torch::randn({shape.batch, shape.hidden});
    target_ = torch::randn({shape.batch, shape.hidden});
    link_.all(true);
    link_.share("prepared");
  }

  // local, views and copies take SGD steps; adam and zero take Adam's, with gradients as bucket views.
  Training& training_of(const std::string& mode) {
    if (const auto found = trainings_.find(mode); found != trainings_.end()) return found->second;
    torch::manual_seed(1);
    auto net = make_model(shape_);
    Training training{.parameters = net->parameters(), .optimizer = optimizer_of(mode, net->parameters())};
    if (mode == "local") {
      training.step = [this, net, optimizer = training.optimizer]() mutable {
        return train_step(net, *optimizer, input_, target_);
      };
    } else {
      lockstep::DistributedDataParallel model(net, {.gradient_as_bucket_view = mode != "copies"});
      training.step = [this, model, optimizer = training.optimizer]() mutable {
        return train_step(model, *optimizer, input_, target_);
      };
      training.held_bytes = [model] { return model->stats().held_bytes; };
    }
    return trainings_.emplace(mode, std::move(training)).first->second;
  }

  static std::shared_ptr<torch::optim::Optimizer> optimizer_of(const std::string& mode,
                                                               const std::vector<at::Tensor>& parameters) {
    using torch::optim::Adam, torch::optim::AdamOptions;
    if (mode == "local" || mode == "views" || mode == "copies")
      return std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1e-3));
    if (mode == "adam") return std::make_shared<Adam>(parameters, AdamOptions(1e-4));
    if (mode == "zero")
      return std::make_shared<lockstep::ZeroRedundancyOptimizer<Adam>>(
          parameters, AdamOptions(1e-4), lockstep::ZeroOptions{.parameters_as_bucket_view = true});
    throw std::runtime_error("no mode named " + mode);
  }

  double timed(const Training& training) {
    const std::int64_t start = now_ns();
    if (!std::isfinite(training.step())) throw std::runtime_error("the loss is not a number");
    return static_cast<double>(now_ns() - start) / 1e3;
  }

  // Three steps: buckets are rebuilt after the first, and the second still allocates.
  void warm_up(const Training& training) {
    for (int k = 0; k < 3; ++k) timed(training);
  }

  // Rank 0's clock decides, and its word starts the ranks together.
  std::int64_t steps_for(const Training& training, std::int64_t budget_ns) {
    const double one_us = timed(training);
    link_.all(true);
    return link_.share_number(std::max<std::int64_t>(5, static_cast<std::int64_t>(budget_ns / 1e3 / one_us)));
  }

  static double parameter_sum(const Training& training) {
    double sum = 0;
    for (const at::Tensor& parameter : training.parameters) sum += parameter.detach().sum().item<double>();
    return sum;
  }

  // The ranks' mean: in the local mode they need not be equally quick.
  std::string answer(const std::string& mode, std::int64_t n, const Memory& memory) {
    double us = 0;
    const auto n_ranks = static_cast<std::size_t>(link_.size());
    for (std::size_t rank = 0; rank < n_ranks; ++rank) {
      if (mode != "local" && results_[rank].parameter_sum != results_[0].parameter_sum)
        throw std::runtime_error("the ranks' parameters differ after DDP steps");
      us += results_[rank].us / static_cast<double>(n_ranks);
    }
    std::ostringstream text;
    text.precision(9);
    text << "{\"us\":" << us << ",\"iterations\":" << n << ",\"gradient_bytes\":" << memory.gradients
         << ",\"extra_bytes\":" << memory.extra << ",\"state_bytes\":" << memory.state << "}";
    return text.str();
  }

  Link& link_;
  SharedArray<RankResult>& results_;
  Shape shape_;
  at::Tensor input_;
  at::Tensor target_;
  std::map<std::string, Training> trainings_;  // by mode
};

int run(const Request& arguments) {
  raise_malloc_thresholds();
  const auto n_ranks = static_cast<int>(arguments.number("ranks"));
  SharedArray<RankResult> results(static_cast<std::size_t>(n_ranks));
  const auto link = fork_ranks(n_ranks);
  return guarded(*link, [&] {
    at::set_num_threads(1);
    join_world(*link);
    int code = 0;
    {
      DdpStep contender(*link, results);
      code = serve(*link, [&](const Request& request) { return contender.measure(request); });
    }
    lockstep::destroy_process_group();
    return code;
  });
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, bench::run);
}
