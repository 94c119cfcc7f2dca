// When things happened in a step, and which steps are sampled.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_logging_testing.h"
#include "lockstep/ddp/hooks.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

void expect_in_order(const DdpLoggingData& data) {
  EXPECT_GT(data.forward_compute_time_start, 0);
  EXPECT_LE(data.forward_compute_time_start, data.forward_compute_time_end);
  EXPECT_LE(data.forward_compute_time_end, data.backward_compute_time_start);
  EXPECT_LE(data.backward_compute_time_start, data.backward_compute_time_end);
  EXPECT_LE(data.backward_compute_time_end, data.backward_time_end);
  EXPECT_LE(data.backward_comm_time_start, data.backward_comm_time_end);
  EXPECT_LE(data.backward_comm_time_end, data.backward_time_end);
  EXPECT_EQ(data.forward_compute_time, data.forward_compute_time_end - data.forward_compute_time_start);
  EXPECT_EQ(data.backward_compute_time, data.backward_compute_time_end - data.backward_compute_time_start);
  EXPECT_GT(data.backward_comm_time, 0);
  EXPECT_LE(data.backward_comm_time, data.backward_comm_time_end - data.backward_comm_time_start);
  EXPECT_GE(data.backward_compute_comm_overlap_time, 0);
  EXPECT_LE(data.backward_compute_comm_overlap_time, data.backward_comm_time);

  std::int64_t before = 0;
  for (const std::size_t index : data.prev_iteration_grad_ready_order_indices) {
    EXPECT_LE(before, data.parameter_ready_time.at(index));
    before = data.parameter_ready_time.at(index).value();
  }
  EXPECT_EQ(before, data.backward_compute_time);
  const auto& plan = data.rebuilt_per_bucket_param_indices;
  ASSERT_EQ(data.bucket_ready_time.size(), plan.size());
  std::int64_t started = 0;
  for (std::size_t b = 0; b < plan.size(); ++b) {
    std::int64_t last = 0;
    for (const std::size_t index : plan[b]) last = std::max(last, *data.parameter_ready_time.at(index));
    EXPECT_EQ(data.bucket_ready_time.at(b), last);
    EXPECT_LE(data.bucket_ready_time.at(b), data.bucket_started_time.at(b));
    EXPECT_LE(started, data.bucket_started_time.at(b));
    EXPECT_LT(data.bucket_started_time.at(b), data.bucket_done_time.at(b));
    started = data.bucket_started_time.at(b).value();
  }
}

TEST(DdpLogging, ThingsHappenInOrder) {
  for (const bool hooked : {false, true}) {
    run_threads(2, [&](int rank) {
      auto model = DistributedDataParallel(Mlp(), {.bucket_cap_mb = 0.0002});
      if (hooked) model->register_comm_hook(allreduce_hook());
      train(model, 4, rank);
      const DdpLoggingData data = model->logging_data();
      expect_in_order(data);
      EXPECT_EQ(data.sampled_steps, 4u);
      EXPECT_GT(data.avg_forward_compute_time, 0);
      EXPECT_GT(data.avg_backward_compute_time, 0);
      EXPECT_GT(data.avg_backward_comm_time, 0);
      EXPECT_LE(data.avg_backward_compute_comm_overlap_time, data.avg_backward_comm_time);
    });
  }
}

std::int64_t now_ns() {
  return Deadline::now().monotonic_ns();
}

// A pause in the middle of backward(), long after everything before it has been reduced.
struct Pause : torch::autograd::Function<Pause> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t* ended, const Group& group) {
    context->saved_data["ended"] = reinterpret_cast<std::int64_t>(ended);
    group_of_thread = group;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    barrier({.group = group_of_thread});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    *reinterpret_cast<std::int64_t*>(context->saved_data["ended"].toInt()) = now_ns();
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
  inline static thread_local Group group_of_thread;
};

struct PausingImpl : torch::nn::Module {
  PausingImpl() {
    first = register_module("first", torch::nn::Linear(kIn, kIn));
    last = register_module("last", torch::nn::Linear(kIn, kIn));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(Pause::apply(first(x), &pause_ended, default_group()));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::int64_t pause_ended = 0;
};
TORCH_MODULE(Pausing);

TEST(DdpLogging, ABucketIsDoneWhenItIsReducedNotWhenItIsWaitedFor) {
  for (const bool hooked : {false, true}) {
    run_threads(2, [&](int rank) {
      Pausing net;
      auto model = DistributedDataParallel(net, {.bucket_cap_mb_list = {0.0001}});
      if (hooked) model->register_comm_hook(allreduce_hook());
      train(model, 3, rank);
      const DdpLoggingData data = model->logging_data();
      ASSERT_GE(data.bucket_done_time.size(), 2u);
      EXPECT_LT(data.backward_compute_time_start + data.bucket_done_time.front().value(), net->pause_ended);
      EXPECT_GT(data.backward_compute_time_start + data.bucket_started_time.back().value(), net->pause_ended);
      EXPECT_GT(data.backward_compute_comm_overlap_time, 0);
      // Nothing was under way during the pause.
      EXPECT_LT(data.backward_comm_time, data.backward_comm_time_end - data.backward_comm_time_start);
      Pause::group_of_thread = nullptr;
    });
  }
}

// The hooks of parameters come late: the last layer has been computed by then.
TEST(DdpLogging, BackwardBeginsAtTheOutputs) {
  run_threads(2, [](int rank) {
    struct Slow : torch::nn::Module {
      Slow() { layer = register_module("layer", torch::nn::Linear(kIn, kIn)); }
      at::Tensor forward(const at::Tensor& x) {
        return Pause::apply(layer(x), &pause_ended, default_group());
      }
      torch::nn::Linear layer{nullptr};
      std::int64_t pause_ended = 0;
    };
    auto net = std::make_shared<Slow>();
    auto model = DistributedDataParallel(net);
    train(model, 1, rank);
    const DdpLoggingData data = model->logging_data();
    EXPECT_LT(data.backward_compute_time_start, net->pause_ended);
    EXPECT_GT(data.parameter_ready_time.at(0), 50'000'000);
    Pause::group_of_thread = nullptr;
  });
}

TEST(DdpLogging, SamplesTheFirstTenStepsAndThenSome) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(torch::nn::Linear(kIn, kOut));
    train(model, 20, rank);
    EXPECT_EQ(model->logging_data().sampled_steps, 10u);
    const auto start_of_tenth = model->logging_data().forward_compute_time_start;
    train(model, 80, rank);
    EXPECT_EQ(model->logging_data().sampled_steps, 11u);  // the hundredth
    EXPECT_GT(model->logging_data().forward_compute_time_start, start_of_tenth);
    model->set_ddp_runtime_logging_sample_rate(4);
    train(model, 9, rank);  // 104, 108
    EXPECT_EQ(model->logging_data().sampled_steps, 13u);
    model->set_ddp_runtime_logging_sample_rate(1);
    train(model, 3, rank);
    EXPECT_EQ(model->logging_data().sampled_steps, 16u);
    for (const int bad : {0, -5}) {
      EXPECT_NE(refusal([&] { model->set_ddp_runtime_logging_sample_rate(bad); }).find("1 (every step)"),
                std::string::npos);
    }
  });
}

TEST(DdpLogging, AStepIsTakenDownWholeWhateverHappensBetweenItsForwardAndBackward) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp(), {.bucket_cap_mb = 0.0002});
    train(model, 2, rank);
    const at::Tensor loss = model->forward(input_of(0, rank)).square().sum();
    {
      const torch::NoGradGuard no_grad;
      model->forward(input_of(1, rank));
    }
    {
      const auto guard = model->no_sync();
      model->forward(input_of(2, rank)).sum().backward();
    }
    loss.backward();
    EXPECT_EQ(model->logging_data().sampled_steps, 3u);
    expect_in_order(model->logging_data());
  });
}

}  // namespace
}  // namespace lockstep
