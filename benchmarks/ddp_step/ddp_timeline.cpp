// Trains an MLP for a while and writes the logging data of one step, of every rank: what
// benchmarks/timeline.py draws.
//   ddp_timeline out=FOLDER ranks=2 hidden=1024 layers=8 batch=32 bias=1 cap_mb=4 steps=60
// writes FOLDER/rank0.json and so on. The step is the one of median length on rank 0, so that the picture
// shows what is usual.
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/common/fork_link.h"
#include "benchmarks/common/join_world.h"
#include "benchmarks/common/serve.h"
#include "benchmarks/ddp_step/malloc_thresholds.h"
#include "benchmarks/ddp_step/models.h"
#include "lockstep/ddp/ddp.h"

namespace bench {
namespace {

struct Step {
  std::int64_t ns;
  std::string json;
};

std::vector<Step> train(const Request& request, int rank) {
  const Shape shape = shape_of(request);
  torch::manual_seed(1);
  lockstep::DistributedDataParallel model(
      make_model(shape),
      {.bucket_cap_mb = std::stod(request.text("cap_mb")), .gradient_as_bucket_view = true});
  model->set_ddp_runtime_logging_sample_rate(1);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(1e-3));
  torch::manual_seed(100 + rank);
  const at::Tensor input = torch::randn({shape.batch, shape.hidden});
  const at::Tensor target = torch::randn({shape.batch, shape.hidden});
  std::vector<Step> steps;
  for (std::int64_t k = 0; k < request.number("steps"); ++k) {
    train_step(model, sgd, input, target);
    const lockstep::DdpLoggingData data = model->logging_data();
    steps.push_back({data.backward_time_end - data.forward_compute_time_start, data.to_json()});
  }
  steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2));  // warm by then
  return steps;
}

std::size_t median_step(const std::vector<Step>& steps) {
  std::vector<std::size_t> order(steps.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](std::size_t k) { return steps[k].ns; });
  return order[order.size() / 2];
}

int run(const Request& request) {
  raise_malloc_thresholds();
  const auto link = fork_ranks(static_cast<int>(request.number("ranks")));
  return guarded(*link, [&] {
    at::set_num_threads(1);
    join_world(*link);
    const std::vector<Step> steps = train(request, link->rank());
    const auto chosen =
        static_cast<std::size_t>(link->share_number(static_cast<std::int64_t>(median_step(steps))));
    const std::string path = request.text("out") + "/rank" + std::to_string(link->rank()) + ".json";
    std::ofstream out(path);
    out << steps.at(chosen).json << '\n';
    if (!out.flush()) throw std::runtime_error("cannot write " + path);
    link->all(true);
    lockstep::destroy_process_group();
    return 0;
  });
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, bench::run);
}
