// What DistributedDataParallel says when something is wrong, and that nobody waits for ever.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/debug/debug.h"

namespace lockstep {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

AssertionResult raises(ErrorKind kind, const std::vector<std::string>& parts,
                       const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    if (error.kind() != kind) return AssertionFailure() << to_string(error.kind()) << ": " << error.what();
    for (const std::string& part : parts) {
      if (std::string(error.what()).find(part) == std::string::npos) {
        return AssertionFailure() << "\"" << part << "\" is missing in: " << error.what();
      }
    }
    return AssertionSuccess();
  } catch (const std::exception& error) {
    return AssertionFailure() << "not a lockstep::Error: " << error.what();
  }
  return AssertionFailure() << "nothing was raised";
}

struct TwoHeads : torch::nn::Module {
  explicit TwoHeads(std::int64_t width = 3) {
    trunk = register_module("trunk", torch::nn::Linear(2, width));
    left = register_module("left", torch::nn::Linear(width, 1));
    right = register_module("right", torch::nn::Linear(width, 1));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor y = trunk(x);
    return {left(y).sum(), right(y).sum()};
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};

const at::Tensor& input() {
  static const at::Tensor ones = torch::ones({4, 2});
  return ones;
}

TEST(DdpErrors, NeedsAGroup) {
  EXPECT_TRUE(raises(ErrorKind::kUsage, {}, [] { DistributedDataParallel(torch::nn::Linear(1, 1)); }));
}

TEST(DdpErrors, RefusesModulesAndOptionsItCannotServe) {
  run_threads(1, [](int) {
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"no parameter that requires"},
                       [] { DistributedDataParallel(torch::nn::Sequential(torch::nn::ReLU())); }));
    EXPECT_TRUE(
        raises(ErrorKind::kUsage, {"null"}, [] { DistributedDataParallel(std::shared_ptr<TwoHeads>()); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"device_ids"},
                       [] { DistributedDataParallel(torch::nn::Linear(1, 1), {.device_ids = {0}}); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"device_ids", "2 entries"}, [] {
      DistributedDataParallel(torch::nn::Linear(1, 1), {.device_ids = {0, 1}});
    }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"device_ids"},
                       [] { DistributedDataParallel(torch::nn::Linear(1, 1), {.output_device = 0}); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"bucket_cap_mb", "-1"},
                       [] { DistributedDataParallel(torch::nn::Linear(1, 1), {.bucket_cap_mb = -1}); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"wieght"},
                       [] { DistributedDataParallel(torch::nn::Linear(1, 1), {.ignored = {"wieght"}}); }));
    struct Unborn : torch::nn::Module {
      Unborn() { register_parameter("late", torch::empty({2}, torch::TensorOptions(torch::kMeta))); }
    };
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"late", "dry forward"},
                       [] { DistributedDataParallel(std::make_shared<Unborn>()); }));
  });
}

TEST(DdpErrors, EveryRankReportsDifferentParameterCounts) {
  run_threads(3, [](int rank) {
    const bool odd = rank == 1;
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"has 1", "has 2", "rank 1"}, [&] {
      DistributedDataParallel(torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(!odd)));
    }));
  });
}

TEST(DdpErrors, NamesTheFirstParameterThatDiffers) {
  run_threads(3, [](int rank) {
    const auto wrap = [&] { DistributedDataParallel(std::make_shared<TwoHeads>(rank == 2 ? 5 : 3)); };
    if (rank == 2) {
      EXPECT_TRUE(
          raises(ErrorKind::kUsage, {"parameter 0", "trunk.weight", "[5, 2]", "[3, 2]", "rank 2"}, wrap));
    } else {
      EXPECT_TRUE(raises(ErrorKind::kUsage, {"rank 2", "differ"}, wrap));
    }
  });
}

TEST(DdpErrors, NextForwardNamesParametersThatGotNoGradient) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<TwoHeads>());
    model->forward(input()).first.backward();
    const std::vector<std::string> parts{"4 (right.weight)", "5 (right.bias)", "find_unused_parameters"};
    EXPECT_TRUE(raises(ErrorKind::kUsage, parts, [&] { model->check_reducer_finalized(); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, parts, [&] { model->forward(input()); }));
    const torch::NoGradGuard no_grad;
    model->forward(input());  // evaluating is still possible
  });
}

TEST(DdpErrors, TwoBackwardsMayCompleteOneReduction) {
  run_threads(2, [](int rank) {
    struct Apart : torch::nn::Module {
      Apart() {
        a = register_parameter("a", torch::ones({1}));
        b = register_parameter("b", torch::ones({1}));
      }
      std::pair<at::Tensor, at::Tensor> forward(double s) { return {a * s, b * s}; }
      at::Tensor a, b;
    };
    auto model = DistributedDataParallel(std::make_shared<Apart>());
    const auto [one, two] = model->forward(rank == 0 ? 1 : 3);
    one.backward();
    two.backward();
    EXPECT_EQ(model->module()->a.grad().item<float>(), 2.0F);
    EXPECT_EQ(model->module()->b.grad().item<float>(), 2.0F);
    model->check_reducer_finalized();
  });
}

TEST(DdpErrors, AGradientThatComesTwiceIsAnError) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<TwoHeads>());
    const auto [left, right] = model->forward(input());
    left.backward({}, /*keep_graph=*/true);
    const std::vector<std::string> parts{"(trunk.", "twice", "checkpoint"};
    EXPECT_TRUE(raises(ErrorKind::kUsage, parts, [&, r = right] { r.backward(); }));
    EXPECT_TRUE(raises(ErrorKind::kUsage, parts, [&] { model->forward(input()); }));
  });
}

TEST(DdpErrors, AParameterResizedAfterWrappingIsAnError) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(torch::nn::Linear(2, 1));
    model->module()->weight.set_data(torch::ones({1, 3}));
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"0 (weight)", "8 bytes", "12 bytes", "resize"}, [&] {
      model->forward(torch::ones({1, 3}));
    }));
  });
}

TEST(DdpErrors, AParameterConvertedAfterWrappingIsAnError) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(torch::nn::Linear(2, 1));
    model->module()->to(torch::kDouble);
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"0 (weight)", "Double", "Float"},
                       [&] { model->forward(input().to(torch::kDouble)); }));
  });
}

// Gradients kept outside .grad, as a distributed-autograd context does.
class Context final : public GradientAccess {
 public:
  at::Tensor get(const at::Tensor& parameter) const override {
    const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
    return found == gradients_.end() ? at::Tensor() : found->second;
  }
  void set(const at::Tensor& parameter, at::Tensor gradient) override {
    gradients_[parameter.unsafeGetTensorImpl()] = std::move(gradient);
  }

 private:
  std::map<const at::TensorImpl*, at::Tensor> gradients_;
};

TEST(Reducer, ReadsAndWritesGradientsWhereItsAccessorKeepsThem) {
  run_threads(2, [](int rank) {
    for (const bool views : {false, true}) {
      const at::Tensor a = torch::ones({3}).requires_grad_();
      const at::Tensor b = torch::ones({2}).requires_grad_();
      auto context = std::make_shared<Context>();
      context->set(a, torch::full({3}, rank == 0 ? 1.0 : 3.0));
      auto reducer = internal::Reducer::create(
          {a, b}, {"a", "b"},
          {.group = default_group(), .gradient_as_bucket_view = views, .access = context});
      reducer->prepare_for_forward();
      const at::Tensor loss = a.sum() * (rank + 5) + b.sum();
      reducer->expect_backward();
      loss.backward();
      EXPECT_TRUE(torch::equal(context->get(a), torch::full({3}, 2.0)));
      EXPECT_TRUE(torch::equal(context->get(b), torch::zeros({2})));      // had none anywhere: allocated
      EXPECT_TRUE(torch::equal(a.grad(), torch::full({3}, rank + 5.0)));  // untouched
    }
  });
}

TEST(Reducer, RefusesAGradientOfAnotherType) {
  run_threads(2, [](int) {
    const at::Tensor a = torch::ones({3}).requires_grad_();
    auto context = std::make_shared<Context>();
    context->set(a, torch::ones({3}, torch::kDouble));
    auto reducer = internal::Reducer::create({a}, {"a"}, {.group = default_group(), .access = context});
    reducer->expect_backward();
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"0 (a)", "Double", "Float"}, [&] { a.sum().backward(); }));
  });
}

std::atomic<int> warnings_seen{0};

void count_warnings_of_strides() {
  warnings_seen = 0;
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarn && text.find("strides") != std::string_view::npos) ++warnings_seen;
  });
}

TEST(Reducer, StridesOfDimensionsOfSizeOneAreNoReasonToWarn) {
  count_warnings_of_strides();
  run_threads(2, [](int rank) {
    const at::Tensor a = torch::ones({1, 3}).requires_grad_();
    auto context = std::make_shared<Context>();
    context->set(a, (torch::arange(3.0) + rank).as_strided({1, 3}, {1, 1}));
    auto reducer = internal::Reducer::create({a}, {"a"}, {.group = default_group(), .access = context});
    reducer->prepare_for_forward();
    reducer->expect_backward();
    a.sum().backward();
    EXPECT_TRUE(torch::equal(context->get(a), (torch::arange(3.0) + 0.5).view({1, 3})));
  });
  set_log_sink(nullptr);
  EXPECT_EQ(warnings_seen.load(), 0);
}

TEST(Reducer, WarnsOnceOfAGradientWithOtherStrides) {
  count_warnings_of_strides();
  run_threads(2, [](int rank) {
    const at::Tensor a = torch::ones({2, 3}).requires_grad_();
    auto context = std::make_shared<Context>();
    const at::Tensor turned = torch::arange(6.0).view({3, 2}).t();
    context->set(a, turned + rank);
    EXPECT_NE(context->get(a).strides(), a.strides());
    auto reducer = internal::Reducer::create({a}, {"a"}, {.group = default_group(), .access = context});
    for (int step = 0; step < 2; ++step) {
      reducer->prepare_for_forward();
      reducer->expect_backward();
      a.sum().backward();
      EXPECT_TRUE(torch::equal(context->get(a), turned + 0.5));
    }
  });
  set_log_sink(nullptr);
  EXPECT_EQ(warnings_seen.load(), 2);  // once per rank
}

TEST(DdpErrors, ASparseGradientWhereNoneIsExpectedIsRefusedAloud) {
  struct Hidden : torch::nn::Module {
    Hidden() { weight = register_parameter("weight", torch::ones({4, 2})); }
    at::Tensor forward(const at::Tensor& x) { return torch::embedding(weight, x, -1, false, true); }
    at::Tensor weight;
  };
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<Hidden>());
    EXPECT_TRUE(raises(ErrorKind::kUnsupported, {"weight", "Sparse"}, [&] {
      model->forward(torch::tensor({1, 2})).sum().backward();
    }));
  });
}

TEST(DdpErrors, ADenseGradientOfASparseLayerIsAnError) {
  run_threads(2, [](int) {
    torch::nn::Embedding layer(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    auto model = DistributedDataParallel(layer);
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"weight", "sparse=true"}, [&] {
      (model->forward(torch::tensor({1, 2})).sum() + layer->weight.sum()).backward();
    }));
  });
}

// Stands for any failure of user code in the middle of a backward pass.
struct Explode : torch::autograd::Function<Explode> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool armed) {
    context->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["armed"].toBool()) throw std::runtime_error("exploded");
    return {gradients[0], at::Tensor()};
  }
};

struct Explosive : torch::nn::Module {
  Explosive() {
    first = register_parameter("first", torch::ones({4}));
    second = register_parameter("second", torch::ones({4}));
  }
  at::Tensor forward(bool armed) { return (Explode::apply(first * 2, armed) * second).sum(); }
  at::Tensor first, second;
};

TEST(DdpErrors, ARankThatDiesInBackwardIsNamedByTheOthers) {
  for (const bool views : {false, true}) {
    int n_named = 0;
    std::mutex mutex;
    EXPECT_THROW(
        run_threads(
            3,
            [&](int rank) {
              auto model =
                  DistributedDataParallel(std::make_shared<Explosive>(),
                                          {.bucket_cap_mb = 0.00001, .gradient_as_bucket_view = views});
              for (int step = 0; step < 3; ++step) {
                const at::Tensor loss = model->forward(rank == 1 && step == 2);
                if (step < 2 || rank == 1) {
                  loss.backward();
                  continue;
                }
                const auto peer_lost = [&](const std::function<void()>& fn) {
                  return raises(ErrorKind::kPeerLost, {"DistributedDataParallel", "rank 1"}, fn);
                };
                EXPECT_TRUE(peer_lost([&] { loss.backward(); }));
                EXPECT_TRUE(raises(ErrorKind::kPeerLost, {"cannot go on"}, [&] { model->forward(false); }));
                const std::lock_guard lock(mutex);
                ++n_named;
              }
            }),
        std::exception);
    EXPECT_EQ(n_named, 2);
  }
}

TEST(DdpErrors, AFailedBackwardIsRemembered) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<Explosive>());
    EXPECT_THROW(model->forward(true).backward(), std::runtime_error);
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"0 (first)"}, [&] { model->forward(false); }));
  });
}

TEST(DdpErrors, AReplacedBucketViewIsAnError) {
  run_threads(2, [](int) {
    auto net = std::make_shared<Explosive>();
    auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = true});
    // A hook of the user's that runs later in the same backward pass: on the other parameter.
    net->first.register_hook([net](const at::Tensor&) { net->second.mutable_grad() = torch::zeros({4}); });
    EXPECT_TRUE(raises(ErrorKind::kUsage, {"second", "gradient_as_bucket_view"},
                       [&] { model->forward(false).backward(); }));
  });
}

TEST(DdpLog, LogsHowItWasBuiltWhenTheDebugLevelRequestsIt) {
  static std::mutex mutex;
  static std::string lines;
  set_log_sink([](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    lines += text;
  });
  set_log_level(LogLevel::kInfo);
  run_threads(2, [](int) {
    DistributedDataParallel(torch::nn::Linear(3, 2), {.bucket_cap_mb = 7});
    barrier();
    EXPECT_EQ(lines.find("parameters trained"), std::string::npos) << lines;
    barrier();
    set_debug_level(DebugLevel::kInfo);
    DistributedDataParallel(torch::nn::Linear(3, 2), {.bucket_cap_mb = 7});
  });
  set_debug_level(DebugLevel::kOff);
  set_log_level_from_env();
  set_log_sink(nullptr);
  for (const char* part :
       {"rank 1 of 2", "2 of 2 parameters trained, 32 bytes", "bucket_cap_mb 7", "weight [2, 3] Float"})
    EXPECT_NE(lines.find(part), std::string::npos) << part << " is missing in: " << lines;
}

}  // namespace
}  // namespace lockstep
