// What a model records about itself.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "lockstep/base/log.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_logging_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/debug/debug.h"
#include "lockstep/optim/functional_optimizer.h"

namespace lockstep {
namespace {

using namespace ddp_testing;
using Indices = std::vector<std::size_t>;

std::uint64_t bytes_of(const torch::nn::Module& module) {
  std::uint64_t n_bytes = 0;
  for (const auto& parameter : module.parameters()) n_bytes += parameter.nbytes();
  return n_bytes;
}

TEST(DdpLogging, RecordsHowTheModelWasBuilt) {
  run_threads(2, [](int rank) {
    Mlp net;
    net->second->to(torch::kDouble);
    auto model = DistributedDataParallel(net, {.broadcast_buffers = false,
                                               .bucket_cap_mb = 2,
                                               .gradient_as_bucket_view = true,
                                               .static_graph = true,
                                               .ignored = {"last.weight"}});
    const DdpLoggingData data = model->logging_data();
    EXPECT_EQ(data.world_size, 2);
    EXPECT_EQ(data.rank, rank);
    EXPECT_NE(data.module_name.find("Mlp"), std::string::npos) << data.module_name;
    EXPECT_FALSE(data.is_multi_device_module);
    EXPECT_EQ(data.num_parameter_tensors, 4u);
    EXPECT_EQ(data.total_parameter_size_bytes, bytes_of(*net->first) + bytes_of(*net->second));
    EXPECT_EQ(data.parameter_names,
              (std::vector<std::string>{"first.weight", "first.bias", "second.weight", "second.bias"}));
    EXPECT_EQ(data.dtypes, (std::vector<std::string>{"Float", "Double"}));
    EXPECT_EQ(data.bucket_sizes, (Indices{bytes_of(*net->second), bytes_of(*net->first)}));
    EXPECT_TRUE(data.device_ids.empty());
    EXPECT_FALSE(data.output_device);
    EXPECT_FALSE(data.broadcast_buffers);
    EXPECT_FALSE(data.has_sync_bn);
    EXPECT_EQ(data.bucket_cap_bytes, 2u << 20);
    EXPECT_FALSE(data.find_unused_parameters);
    EXPECT_TRUE(data.gradient_as_bucket_view);
    EXPECT_TRUE(data.static_graph);
    EXPECT_EQ(data.backend_name, default_group()->backend());
    EXPECT_EQ(data.torch_distributed_debug, "OFF");
    EXPECT_EQ(data.iteration, 0u);
    EXPECT_FALSE(data.has_error);
    EXPECT_EQ(data.comm_hook, "");
    EXPECT_FALSE(data.join_uneven_inputs);
  });
}

TEST(DdpLogging, RecordsWhatWasSetLater) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(Mlp());
    model->register_comm_hook(fp16_compress_hook());
    model->set_static_graph();
    const DdpLoggingData data = model->logging_data();
    EXPECT_EQ(data.comm_hook, fp16_compress_hook().name);
    EXPECT_TRUE(data.static_graph);
    EXPECT_EQ(data.bucket_cap_bytes, kDefaultBucketCapBytes);
  });
}

TEST(DdpLogging, RemembersUnevenInputsAndLeavesShadowedStepsOut) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp());
    train(model, 1, rank);
    join({*model}, [&] { train(model, rank == 0 ? 1 : 4, rank); });
    const DdpLoggingData data = model->logging_data();
    EXPECT_TRUE(data.join_uneven_inputs);
    EXPECT_EQ(data.iteration, 5u);
    EXPECT_EQ(data.sampled_steps, rank == 0 ? 2u : 5u);
  });
}

TEST(DdpLogging, KnowsALayerThatSynchronisesItsStatistics) {
  struct SyncBatchNormLike : torch::nn::Module {
    SyncBatchNormLike() : torch::nn::Module("SyncBatchNorm2d") {
      register_parameter("weight", torch::ones({1}));
    }
  };
  struct Outer : torch::nn::Module {
    Outer() { register_module("norm", std::make_shared<SyncBatchNormLike>()); }
    void forward() {}
  };
  run_threads(2, [](int) {
    EXPECT_TRUE(DistributedDataParallel(std::make_shared<Outer>())->logging_data().has_sync_bn);
  });
}

TEST(DdpLogging, HasNoTimesInAWorldOfOne) {
  run_threads(1, [](int) {
    auto model = DistributedDataParallel(Mlp());
    train(model, 2, 0);
    const DdpLoggingData data = model->logging_data();
    EXPECT_EQ(data.world_size, 1);
    EXPECT_EQ(data.num_parameter_tensors, 5u);
    EXPECT_EQ(data.iteration, 0u);
    EXPECT_EQ(data.sampled_steps, 0u);
    EXPECT_EQ(data.forward_compute_time, 0);
    EXPECT_TRUE(data.bucket_done_time.empty());
    EXPECT_NE(refusal([&] { model->set_ddp_runtime_logging_sample_rate(0); }), "no error");
  });
}

TEST(DdpLogging, AnOptimizerInsideBackwardIsTimedInAWorldOfOneToo) {
  run_threads(1, [](int) {
    auto model = DistributedDataParallel(Mlp());
    model->register_fused_optimizer(
        std::make_shared<FunctionalSGD>(std::vector<at::Tensor>(), torch::optim::SGDOptions(0.1),
                                        FunctionalOptions{.allow_empty_param_list = true}));
    train(model, 2, 0);
    EXPECT_EQ(model->logging_data().sampled_steps, 2u);
    EXPECT_GT(model->logging_data().backward_compute_time, 0);
  });
}

TEST(DdpLogging, FollowsTheModelToAnotherGroup) {
  run_threads(4, [](int rank) {
    const Group low = new_group({0, 1}), high = new_group({2, 3});
    auto model = DistributedDataParallel(torch::nn::Linear(kIn, kOut));
    model->set_ddp_runtime_logging_sample_rate(1);
    train(model, 3, rank);
    model->update_process_group(rank < 2 ? low : high);
    train(model, 12, rank);
    const DdpLoggingData data = model->logging_data();
    EXPECT_EQ(data.world_size, 2);
    EXPECT_EQ(data.rank, rank % 2);
    EXPECT_EQ(data.sampled_steps, 12u);
  });
}

TEST(DdpLogging, NamesTheParametersThatItsIndicesMean) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp(), {.delay_all_reduce_named_params = {"second.weight"},
                                                 .param_to_hook_all_reduce = "first.weight"});
    train(model, 2, rank);
    const DdpLoggingData data = model->logging_data();
    EXPECT_EQ(data.num_parameter_tensors, 5u);
    EXPECT_EQ(data.parameter_names,
              (std::vector<std::string>{"first.weight", "first.bias", "second.bias", "last.weight"}));
    EXPECT_EQ(data.parameter_ready_time.size(), data.parameter_names.size());
  });
}

TEST(DdpLogging, RecordsRebuiltBucketsAndTheOrderOfGradients) {
  run_threads(3, [](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0002});
    train(model, 1, rank);
    DdpLoggingData data = model->logging_data();
    EXPECT_FALSE(data.has_rebuilt_buckets);
    EXPECT_TRUE(data.rebuilt_bucket_sizes.empty());
    EXPECT_EQ(data.num_buckets_reduced, 1u);
    train(model, 1, rank);
    data = model->logging_data();
    EXPECT_EQ(data.iteration, 2u);
    EXPECT_TRUE(data.has_rebuilt_buckets);
    EXPECT_GT(data.rebuilt_bucket_sizes.size(), 1u);
    EXPECT_EQ(data.num_buckets_reduced, data.rebuilt_bucket_sizes.size());
    EXPECT_EQ(std::accumulate(data.rebuilt_bucket_sizes.begin(), data.rebuilt_bucket_sizes.end(), 0ul),
              bytes_of(*net));
    EXPECT_EQ(data.bucket_sizes, Indices{bytes_of(*net)});
    Indices order = data.prev_iteration_grad_ready_order_indices;
    Indices planned;
    for (const auto& bucket : data.rebuilt_per_bucket_param_indices)
      planned.insert(planned.end(), bucket.begin(), bucket.end());
    EXPECT_EQ(order.front(), 4u);  // the last layer's
    EXPECT_EQ(planned.front(), 4u);
    std::ranges::sort(order);
    std::ranges::sort(planned);
    EXPECT_EQ(order, (Indices{0, 1, 2, 3, 4}));
    EXPECT_EQ(planned, order);
  });
}

struct TwoPathsImpl : torch::nn::Module {
  TwoPathsImpl() {
    a = register_module("a", torch::nn::Linear(kIn, kIn));
    b = register_module("b", torch::nn::Linear(kIn, kOut));
  }
  at::Tensor forward(const at::Tensor& x, bool both) { return both ? b(a(x)) : a(x); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(TwoPaths);

TEST(DdpLogging, RecordsHowManyBytesAreUnusedAndWhetherThatChanges) {
  run_threads(2, [](int rank) {
    TwoPaths net;
    auto model = DistributedDataParallel(
        net,
        {.bucket_cap_mb = 0.00001, .find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    EXPECT_FALSE(model->logging_data().can_set_static_graph);
    const auto step = [&](bool both) { model->forward(input_of(0, rank), both).sum().backward(); };
    step(false);
    step(false);
    DdpLoggingData data = model->logging_data();
    EXPECT_TRUE(data.can_set_static_graph);
    EXPECT_EQ(data.unused_parameter_size, bytes_of(*net->b));
    EXPECT_EQ(data.num_buckets_reduced, 2u);  // of four: those of b were left out
    EXPECT_EQ(std::ranges::count_if(data.bucket_done_time, [](const auto& time) { return !time; }), 2);
    step(true);
    data = model->logging_data();
    EXPECT_FALSE(data.can_set_static_graph);
    EXPECT_EQ(data.unused_parameter_size, 0u);
    EXPECT_EQ(data.num_buckets_reduced, 4u);
  });
}

TEST(DdpLogging, RecordsTheErrorThatTheNextForwardRaises) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(TwoPaths());
    model->forward(input_of(0, rank), true).sum().backward();
    EXPECT_FALSE(model->logging_data().has_error);
    model->forward(input_of(0, rank), false).sum().backward();
    const DdpLoggingData data = model->logging_data();
    EXPECT_TRUE(data.has_error);
    EXPECT_NE(data.error.find("b.weight"), std::string::npos) << data.error;
    EXPECT_EQ(data.error, refusal([&] { model->forward(input_of(0, rank), true); }));
  });
}

TEST(DdpLogging, RecordsAReductionThatFailed) {
  run_threads(2, [](int rank) {
    const Group group = new_group({0, 1});
    auto model = DistributedDataParallel(Mlp(), {.group = group});
    const at::Tensor loss = model->forward(input_of(0, rank)).sum();
    barrier();
    if (rank == 0) group->abort("the test wants it so");
    EXPECT_NE(refusal([&] { loss.backward(); }), "no error");
    const DdpLoggingData data = model->logging_data();
    EXPECT_TRUE(data.has_error);
    EXPECT_NE(data.error.find("the test wants it so"), std::string::npos) << data.error;
    EXPECT_EQ(data.sampled_steps, 0u);
  });
}

TEST(DdpLogging, IsOneJsonObject) {
  DdpLoggingData data;
  data.world_size = 2;
  data.module_name = "a \"b\" \\ \n c";
  data.has_error = true;
  data.rebuilt_per_bucket_param_indices = {{3, 4}, {}, {1}};
  data.bucket_done_time = {std::nullopt, 5};
  data.dtypes = {"Float", "Half"};
  const std::string json = data.to_json();
  EXPECT_TRUE(
      json.starts_with("{\"world_size\":2,\"rank\":0,\"module_name\":\"a \\\"b\\\" \\\\ \\u000a c\","))
      << json;
  for (const char* part :
       {"\"has_error\":true,", "\"rebuilt_per_bucket_param_indices\":[[3,4],[],[1]],",
        "\"bucket_done_time\":[-1,5]}", "\"dtypes\":[\"Float\",\"Half\"],", "\"error\":\"\","})
    EXPECT_NE(json.find(part), std::string::npos) << part << " is missing in " << json;
  EXPECT_EQ(json.find('\n'), std::string::npos);
}

TEST(DdpLog, WritesStatisticsAtCertainCountsWhenTheDebugLevelIsDetail) {
  static std::mutex mutex;
  static std::vector<std::string> lines;
  lines.clear();
  set_log_sink([](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (text.find("statistics: {") != std::string_view::npos) lines.emplace_back(text);
  });
  set_log_level(LogLevel::kInfo);
  run_threads(2, [](int rank) {
    const auto run = [&](DebugLevel level) {
      barrier();
      set_debug_level(level);
      barrier();
      auto model = DistributedDataParallel(torch::nn::Linear(kIn, kOut));
      model->set_ddp_runtime_logging_sample_rate(1);
      train(model, 22, rank);
    };
    run(DebugLevel::kInfo);
    barrier();
    EXPECT_TRUE(lines.empty());
    run(DebugLevel::kDetail);
  });
  set_debug_level(DebugLevel::kOff);
  set_log_level_from_env();
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 4u);  // at 10 and 20, on two ranks
  const auto with = [&](const char* part) {
    return std::ranges::count_if(lines,
                                 [&](const auto& line) { return line.find(part) != std::string::npos; });
  };
  EXPECT_EQ(with("\"sampled_steps\":10,"), 2);
  EXPECT_EQ(with("\"sampled_steps\":20,"), 2);
  EXPECT_EQ(with("\"torch_distributed_debug\":\"DETAIL\""), 4);
}

}  // namespace
}  // namespace lockstep
