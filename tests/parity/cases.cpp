#include "tests/parity/cases.h"

#include <lockstep/lockstep.h>

#include <memory>
#include <utility>

#include "tests/parity/models.h"

namespace parity {
namespace {

using lockstep::DistributedDataParallel;

constexpr int kSteps = 20;
constexpr double kSmallBuckets = 0.0001;  // MiB: several buckets even for these models

// One case on one rank: where values come from, and what has been seen.
class Run {
 public:
  Run(int rank, at::ScalarType dtype) : rank_(rank), dtype_(dtype) {}

  // Ranks begin differently; DistributedDataParallel takes rank 0's.
  template <class Net, class... Args>
  std::shared_ptr<Net> filled(Args... args) const {
    auto net = std::make_shared<Net>(args...);
    net->to(dtype_);
    const torch::NoGradGuard no_grad;
    std::uint32_t tag = 1 + 100 * static_cast<std::uint32_t>(rank_);
    for (at::Tensor& parameter : net->parameters()) parameter.copy_(0.5 * numbers(tag++, parameter.sizes()));
    return net;
  }

  int rank() const { return rank_; }
  int uneven_steps() const { return rank_ == 0 ? 14 : kSteps; }
  at::Tensor input(int step, int part = 0) const {
    return numbers(tag(1000, step, part), {kBatch, kIn}).to(dtype_);
  }
  at::Tensor rows(int step) const {
    at::Tensor rows = torch::empty({kBatch, 3}, torch::kLong);
    for (std::uint32_t i = 0; i < 3 * kBatch; ++i)
      rows.data_ptr<std::int64_t>()[i] = scrambled(tag(3000, step, 0), i) % BagsImpl::kRows;
    return rows;
  }
  at::Tensor loss(const at::Tensor& output, int step, int part = 0) const {
    return torch::mse_loss(output, numbers(tag(2000, step, part), {kBatch, kOut}).to(dtype_));
  }

  // `backward` runs forward and backward of a step and returns the loss.
  void train(const torch::nn::Module& net, torch::optim::Optimizer& optimizer,
             const std::function<at::Tensor(int step)>& backward, int steps = kSteps) {
    for (int step = 0; step < steps; ++step) {
      const std::string when = "step" + std::to_string(step);
      optimizer.zero_grad();
      see(when + ".loss", backward(step));
      for (const auto& parameter : net.named_parameters())
        see(when + ".grad." + parameter.key(), parameter.value().grad());
      optimizer.step();
      see_parameters(when, net);
    }
  }
  void see_parameters(const std::string& when, const torch::nn::Module& net) {
    for (const auto& parameter : net.named_parameters())
      see(when + ".param." + parameter.key(), parameter.value());
    for (const auto& buffer : net.named_buffers()) see(when + ".buffer." + buffer.key(), buffer.value());
  }
  // The usual step of a model that takes the step's input.
  template <class Model>
  std::function<at::Tensor(int step)> mse_backward(Model& model) {
    return [this, &model](int step) {
      at::Tensor loss = this->loss(model->forward(input(step)), step);
      loss.backward();
      return loss;
    };
  }
  // Two parts a step; only the second is synced.
  template <class Model>
  std::function<at::Tensor(int step)> accumulating_backward(Model& model) {
    const auto backward = [this, &model](int step, int part) {
      at::Tensor loss = this->loss(model->forward(input(step, part)), step, part);
      loss.backward();
      return loss;
    };
    return [backward, &model](int step) {
      at::Tensor local;
      {
        const auto guard = model->no_sync();
        local = backward(step, 0);
      }
      return local + backward(step, 1);
    };
  }

  Record take() { return std::move(seen_); }

 private:
  std::uint32_t tag(int kind, int step, int part) const {
    return static_cast<std::uint32_t>(kind + 10 * step + 2 * part + rank_);
  }
  void see(const std::string& name, const at::Tensor& tensor) {
    Values& values = seen_[name];
    if (!tensor.defined()) return;
    const at::Tensor dense = (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().to(torch::kDouble);
    const at::Tensor flat = dense.contiguous();
    values.emplace(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
  }

  const int rank_;
  const at::ScalarType dtype_;
  Record seen_;
};

torch::optim::SGD sgd(const torch::nn::Module& net, double momentum = 0.9) {
  return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.05).momentum(momentum));
}

// ---- the cases ----

// A module whose forward takes the input alone, with nothing but options to tell it from others.
template <class Net>
void usual(Run& run, lockstep::DdpOptions options, lockstep::CommHook hook = {}) {
  const auto net = run.filled<Net>();
  options.bucket_cap_mb = kSmallBuckets;
  auto model = DistributedDataParallel(net, options);
  if (hook.run) model->register_comm_hook(std::move(hook));
  auto optimizer = sgd(*net);
  run.train(*net, optimizer, run.mse_backward(model));
}

void plain(Run& run) {
  usual<MlpImpl>(run, {});
}
void bucket_views(Run& run) {
  usual<MlpImpl>(run, {.gradient_as_bucket_view = true});
}

void no_sync(Run& run) {
  const auto net = run.filled<MlpImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  auto optimizer = sgd(*net);
  run.train(*net, optimizer, run.accumulating_backward(model));
}

// Ranks take the same way in three steps of four, and different ones in the fourth.
void find_unused(Run& run) {
  const auto net = run.filled<BranchesImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets, .find_unused_parameters = true});
  auto optimizer = sgd(*net);
  run.train(*net, optimizer, [&](int step) {
    const int way = (step + (step % 4 == 3 ? run.rank() : 0)) % 3;
    at::Tensor loss = run.loss(model->forward(run.input(step), way), step);
    loss.backward();
    return loss;
  });
}

void static_graph(Run& run) {
  usual<RepeatsImpl>(run, {.static_graph = true});
}
void buffers(Run& run) {
  usual<NormedImpl>(run, {});
}

void sparse(Run& run) {
  const auto net = run.filled<BagsImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  auto optimizer = sgd(*net, 0);
  run.train(*net, optimizer, [&](int step) {
    at::Tensor loss = run.loss(model->forward(run.rows(step)), step);
    loss.backward();
    return loss;
  });
}

void fp16_hook(Run& run) {
  usual<MlpImpl>(run, {}, lockstep::fp16_compress_hook());
}

void power_sgd_run(Run& run, bool bias, lockstep::PowerSGDOptions options) {
  const auto net = run.filled<MlpImpl>(12, bias);
  auto model = DistributedDataParallel(net);
  options.min_compression_rate = 1;
  options.random_seed = 5;
  model->register_comm_hook(
      lockstep::powerSGD_hook(std::make_shared<lockstep::PowerSGDState>(std::move(options))));
  auto optimizer = sgd(*net);
  run.train(*net, optimizer, run.mse_backward(model));
}

void power_sgd(Run& run) {
  power_sgd_run(run, false, {.matrix_approximation_rank = 1, .start_powerSGD_iter = 3});
}

// A new random Q in every step: the whole sequence of seeds.
void power_sgd_cold(Run& run) {
  power_sgd_run(run, false, {.matrix_approximation_rank = 1, .start_powerSGD_iter = 2, .warm_start = false});
}

// Two columns, and biases, which are not compressed. Not in f32: see parity.py.
void power_sgd_rank2(Run& run) {
  power_sgd_run(run, true, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 2});
}

void zero(Run& run) {
  const auto net = run.filled<MlpImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(),
                                                                  torch::optim::AdamOptions(0.005));
  run.train(*net, optimizer, run.mse_backward(model));
}

// Five steps together, then each rank alone, with the parameters averaged every fourth step.
void post_local_sgd(Run& run) {
  const auto net = run.filled<MlpImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  model->register_comm_hook(lockstep::post_localSGD_hook(lockstep::PostLocalSGDState::create(
      {.subgroup = lockstep::new_subgroups(1).mine, .start_localSGD_iter = 5})));
  lockstep::PostLocalSGDOptimizer optimizer(
      sgd(*net), std::make_shared<lockstep::PeriodicModelAverager>(
                     lockstep::PeriodicModelAveragerOptions{.period = 4, .warmup_steps = 5}));
  run.train(*net, optimizer, run.mse_backward(model));
}

// Rank 0 runs out of data first.
void join_run(Run& run, lockstep::JoinOptions options) {
  const auto net = run.filled<NormedImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  auto optimizer = sgd(*net);
  lockstep::join(
      {*model}, [&] { run.train(*net, optimizer, run.mse_backward(model), run.uneven_steps()); }, options);
  run.see_parameters("end", *net);
}

void join_initial(Run& run) {
  join_run(run, {.divide_by_initial_world_size = true});
}
void join_active(Run& run) {
  join_run(run, {.divide_by_initial_world_size = false});
}

// Each step in two parts, of which the first is local: the rank that is out of data follows the second alone.
void join_no_sync(Run& run) {
  const auto net = run.filled<MlpImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  auto optimizer = sgd(*net);
  lockstep::join({*model},
                 [&] { run.train(*net, optimizer, run.accumulating_backward(model), run.uneven_steps()); });
  run.see_parameters("end", *net);
}

// The share of the rank that is out of data is updated until the end.
void join_zero(Run& run) {
  const auto net = run.filled<MlpImpl>();
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = kSmallBuckets});
  lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(),
                                                                  torch::optim::AdamOptions(0.005));
  lockstep::join({*model, optimizer},
                 [&] { run.train(*net, optimizer, run.mse_backward(model), run.uneven_steps()); });
  run.see_parameters("end", *net);
}

// The mean of the ranks' gradients, but for one rank too many.
void broken_divisor(Run& run) {
  usual<MlpImpl>(
      run, {},
      {.run =
           [group = lockstep::default_group()](lockstep::GradBucket& bucket) {
             bucket.buffer().div_(kRanks + 1);
             return lockstep::all_reduce(bucket.buffer(), {.group = group, .async_op = true}).get_future();
           },
       .name = "broken divisor"});
}

Case named(std::string name, void (*train)(Run&)) {
  return {.name = std::move(name), .train = [train](int rank, at::ScalarType dtype) {
            Run run(rank, dtype);
            train(run);
            return run.take();
          }};
}

Case only_f64(Case one) {
  one.in_f32 = false;
  return one;
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      named("plain", plain),
      named("bucket_views", bucket_views),
      named("no_sync", no_sync),
      named("find_unused", find_unused),
      named("static_graph", static_graph),
      named("buffers", buffers),
      named("sparse", sparse),
      named("fp16_hook", fp16_hook),
      named("power_sgd", power_sgd),
      named("power_sgd_cold", power_sgd_cold),
      only_f64(named("power_sgd_rank2", power_sgd_rank2)),
      named("zero", zero),
      named("post_local_sgd", post_local_sgd),
      named("join_initial", join_initial),
      named("join_active", join_active),
      named("join_no_sync", join_no_sync),
      named("join_zero", join_zero),
  };
  return all;
}

Record train_with_broken_divisor(int rank, at::ScalarType dtype) {
  return named("broken_divisor", broken_divisor).train(rank, dtype);
}

}  // namespace parity
