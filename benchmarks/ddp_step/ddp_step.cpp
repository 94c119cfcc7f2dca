// A training step with DistributedDataParallel beside the same step without: two rank processes with one thread each,
// both modes in the same processes. "local" is what the machine gives while all ranks step at once and nobody talks.
#include <ATen/Parallel.h>
#include <malloc.h>
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
#include "benchmarks/ddp_step/mlp.h"
#include "lockstep/ddp/ddp.h"

namespace bench {
namespace {

constexpr int kRanks = 2;

struct RankResult {
  double us = 0;
  double parameter_sum = 0;  // the same bits on every rank after a step with DDP
};

class DdpStep {
 public:
  DdpStep(Link& link, SharedArray<RankResult>& results) : link_(link), results_(results) {}

  std::string measure(const Request& request) {
    const std::string& mode = request.text("mode");
    prepare(request.number("hidden"), request.number("layers"));
    const std::function<double()>& step = step_of(mode);
    warm_up(step);
    const std::int64_t n = steps_for(step, request.number("budget_ms") * 1'000'000);
    std::vector<double> us;
    for (std::int64_t k = 0; k < n; ++k) us.push_back(timed(step));
    auto& mine = results_[static_cast<std::size_t>(link_.rank())];
    mine = {median(us), parameter_sum(mode)};
    link_.all(true);
    return link_.rank() == 0 ? answer(mode, n) : "";
  }

 private:
  // Models of one size at a time: the largest takes a gigabyte in its three modes.
  void prepare(std::int64_t hidden, std::int64_t layers) {
    if (hidden == hidden_ && layers == layers_) return;
    steps_.clear();
    parameters_.clear();
    hidden_ = hidden;
    layers_ = layers;
    torch::manual_seed(100 + link_.rank());  // every rank its own batch, as in training
    input_ = torch::randn({kBatch, hidden});
    target_ = torch::randn({kBatch, hidden});
    link_.all(true);
    link_.share("prepared");
  }

  const std::function<double()>& step_of(const std::string& mode) {
    auto& step = steps_[mode];
    if (step) return step;
    torch::manual_seed(1);
    auto mlp = make_mlp(hidden_, layers_);
    parameters_[mode] = mlp->parameters();
    auto optimizer = std::make_shared<torch::optim::SGD>(mlp->parameters(), torch::optim::SGDOptions(1e-3));
    if (mode == "local") {
      step = [this, mlp, optimizer]() mutable { return train_step(mlp, *optimizer, input_, target_); };
    } else if (mode == "views" || mode == "copies") {
      lockstep::DistributedDataParallel model(mlp, {.gradient_as_bucket_view = mode == "views"});
      step = [this, model, optimizer]() mutable { return train_step(model, *optimizer, input_, target_); };
    } else {
      throw std::runtime_error("no mode named " + mode);
    }
    return step;
  }

  double timed(const std::function<double()>& step) {
    const std::int64_t start = now_ns();
    if (!std::isfinite(step())) throw std::runtime_error("the loss is not a number");
    return static_cast<double>(now_ns() - start) / 1e3;
  }

  // Three steps: buckets are rebuilt after the first, and the second still allocates.
  void warm_up(const std::function<double()>& step) {
    for (int k = 0; k < 3; ++k) timed(step);
  }

  // Rank 0's clock decides, and its word starts the ranks together.
  std::int64_t steps_for(const std::function<double()>& step, std::int64_t budget_ns) {
    const double one_us = timed(step);
    link_.all(true);
    return link_.share_number(std::max<std::int64_t>(5, static_cast<std::int64_t>(budget_ns / 1e3 / one_us)));
  }

  double parameter_sum(const std::string& mode) {
    double sum = 0;
    for (const at::Tensor& parameter : parameters_[mode]) sum += parameter.detach().sum().item<double>();
    return sum;
  }

  // The ranks' mean: in the local mode they need not be equally quick.
  std::string answer(const std::string& mode, std::int64_t n) {
    double us = 0;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (mode != "local" && results_[rank].parameter_sum != results_[0].parameter_sum) {
        throw std::runtime_error("the ranks' parameters differ after DDP steps");
      }
      us += results_[rank].us / kRanks;
    }
    std::ostringstream text;
    text.precision(9);
    text << "{\"us\":" << us << ",\"iterations\":" << n << "}";
    return text.str();
  }

  Link& link_;
  SharedArray<RankResult>& results_;
  std::int64_t hidden_ = 0;
  std::int64_t layers_ = 0;
  at::Tensor input_;
  at::Tensor target_;
  std::map<std::string, std::function<double()>> steps_;  // by mode
  std::map<std::string, std::vector<at::Tensor>> parameters_;
};

}  // namespace
}  // namespace bench

int main() {
  // Gradients above malloc's thresholds are mapped and unmapped at every step; the page faults would move the
  // result by 30 %, in either mode.
  // 32 MiB is the highest mmap threshold glibc takes.
  if (::mallopt(M_MMAP_THRESHOLD, 32 << 20) != 1 || ::mallopt(M_TRIM_THRESHOLD, 2147483647) != 1) {
    std::cerr << "malloc refused its thresholds" << std::endl;
    return 1;
  }
  bench::SharedArray<bench::RankResult> results(bench::kRanks);
  const auto link = bench::fork_ranks(bench::kRanks);
  at::set_num_threads(1);
  bench::join_world(*link);
  int code = 0;
  {
    bench::DdpStep contender(*link, results);
    code = bench::serve(*link, [&](const bench::Request& request) { return contender.measure(request); });
  }
  lockstep::destroy_process_group();
  return code;
}
