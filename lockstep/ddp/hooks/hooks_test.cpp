// Each hook against its formula, written out. Power SGD has a file of its own, and so has training with
// hooks.
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/base/detail/raise.h"
#include "lockstep/ddp/hooks/auto_quantize.h"
#include "lockstep/ddp/hooks/compose.h"
#include "lockstep/ddp/hooks/default_hooks.h"
#include "lockstep/ddp/hooks/hooks_testing.h"
#include "lockstep/ddp/hooks/post_local_sgd.h"
#include "lockstep/ddp/hooks/quantization_hooks.h"

namespace lockstep {
namespace {

using namespace hooks_testing;
using lockstep::testing::caught;
using lockstep::testing::refused;
using lockstep::testing::world;

constexpr int kWorlds[] = {1, 2, 3};
constexpr std::int64_t kCount = 1000;

at::Tensor mine(int rank) {
  return gradients_of(rank, 0, kCount);
}

// ---- plain ----

TEST(AllreduceHook, GivesTheMeanInTheBucketItself) {
  for (const int n : kWorlds) {
    world(n, [&](int rank) {
      const at::Tensor flat = mine(rank);
      const at::Tensor result = reduced_by(allreduce_hook(), flat);
      EXPECT_EQ(result.const_data_ptr(), flat.const_data_ptr());
      expect_close(flat, mean_over(n, mine), 1e-6);
      expect_same_on_all_ranks(flat);
    });
  }
}

TEST(AllreduceHook, TakesTheGroupItWasGiven) {
  world(3, [](int rank) {
    const Group pair = new_group({0, 1});
    if (rank == 2) return;
    const at::Tensor flat = mine(rank);
    reduced_by(allreduce_hook({.group = pair}), flat);
    expect_close(flat, mean_over(2, mine), 1e-6);
  });
}

TEST(CompressHooks, CastSumAndDivideOnce) {
  for (const int n : {2, 3}) {
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      world(n, [&](int rank) {
        const at::Tensor flat = mine(rank);
        const CommHook hook = dtype == at::kHalf ? fp16_compress_hook() : bf16_compress_hook();
        const at::Tensor result = reduced_by(hook, flat);
        EXPECT_EQ(result.const_data_ptr(), flat.const_data_ptr());
        // The mean of the cast gradients, rounded to the half type at the end.
        const at::Tensor mean = mean_over(n, [&](int r) { return mine(r).to(dtype); });
        EXPECT_TRUE(at::allclose(flat, mean.to(at::kFloat), dtype == at::kHalf ? 5e-4 : 4e-3, 1e-7));
        EXPECT_TRUE(at::equal(flat, flat.to(dtype).to(at::kFloat)))
            << "a value that the half type does not have";
        EXPECT_FALSE(at::allclose(flat.to(at::kDouble), mean_over(n, mine), 1e-6, 0))
            << "it was not compressed";
        expect_same_on_all_ranks(flat);
      });
    }
  }
}

TEST(CompressHooks, SmallGradientsDoNotVanishByDividing) {
  world(2, [](int) {
    const float least = 6e-8F;  // half's smallest; divided by two it would be zero or twice as large
    const at::Tensor flat = at::full({4}, least);
    reduced_by(fp16_compress_hook(), flat);
    EXPECT_TRUE(at::equal(flat, at::full({4}, least).to(at::kHalf).to(at::kFloat)));
  });
}

TEST(NoopHook, LeavesEveryRankItsOwn) {
  world(2, [](int rank) {
    const at::Tensor flat = mine(rank);
    reduced_by(noop_hook(), flat);
    EXPECT_TRUE(at::equal(flat, mine(rank)));
    EXPECT_EQ(default_group()->sequence_number(), 0U);
  });
}

// ---- composition ----

TEST(Wrappers, AroundAllreduceAreTheCompressHooks) {
  world(3, [](int rank) {
    for (const bool half : {true, false}) {
      const at::Tensor wrapped = mine(rank), whole = mine(rank);
      reduced_by(half ? fp16_compress_wrapper(allreduce_hook()) : bf16_compress_wrapper(allreduce_hook()),
                 wrapped);
      reduced_by(half ? fp16_compress_hook() : bf16_compress_hook(), whole);
      EXPECT_TRUE(at::equal(wrapped, whole));
    }
  });
}

TEST(Wrappers, KeepTheirMemoryButNotTheirValues) {
  world(2, [](int rank) {
    const CommHook hook = fp16_compress_wrapper(allreduce_hook());
    for (int step = 0; step < 3; ++step) {
      const std::int64_t n = step == 2 ? 2 * kCount : kCount;  // buckets are rebuilt once
      const at::Tensor flat = gradients_of(rank, step, n);
      reduced_by(hook, flat);
      expect_close(flat, mean_over(2, [&](int r) { return gradients_of(r, step, n); }), 2e-3);
    }
  });
}

TEST(Wrappers, LeaveABucketOfTheirTypeAlone) {
  world(2, [](int) {
    const at::Tensor flat = at::full({8}, 3, at::kHalf);
    const void* seen = nullptr;
    const CommHook look{.run =
                            [&](GradBucket& bucket) {
                              seen = bucket.buffer().const_data_ptr();
                              return ready_future(bucket.buffer());
                            },
                        .name = "look"};
    reduced_by(fp16_compress_wrapper(look), flat);
    EXPECT_EQ(seen, flat.const_data_ptr());
  });
}

TEST(ChainHooks, NestTheFirstOutermost) {
  world(1, [](int) {
    std::string order;
    const auto note = [&](char sign) -> HookWrapper {
      return [&order, sign](CommHook hook) {
        return wrap_hook(std::move(hook),
                         {.before =
                              [&order, sign](GradBucket& bucket) {
                                order += sign;
                                bucket.set_buffer(bucket.buffer() + 1);
                              },
                          .after =
                              [&order, sign](const at::Tensor& result, const at::Tensor& buffer) {
                                order += sign;
                                EXPECT_EQ((result - buffer).max().item<float>(), sign == 'a' ? 2 : 1);
                                return result;
                              },
                          .name = std::string(1, sign)});
      };
    };
    const CommHook hook = chain_hooks({note('a'), note('b')}, noop_hook());
    EXPECT_EQ(hook.name, "a(b(noop_hook))");
    const at::Tensor result = reduced_by(hook, at::zeros({4}));
    EXPECT_EQ(order, "abba");
    EXPECT_TRUE(at::equal(result, at::full({4}, 2.0F)));
  });
}

TEST(WrapHook, PassesErrorsOn) {
  world(1, [](int) {
    const auto failing = [](GradBucket&) -> GradFuture { base::raise(ErrorKind::kResource, "no room"); };
    const CommHook thrown = fp16_compress_wrapper({.run = failing, .name = "failing"});
    EXPECT_EQ(caught([&] { reduced_by(thrown, at::zeros({4})); }).message, "no room");

    const auto late = [](GradBucket& bucket) {
      return ready_future(bucket.buffer())
          ->then([](c10::ivalue::Future&) -> c10::IValue { base::raise(ErrorKind::kPeerLost, "rank 3"); },
                 c10::TensorType::get());
    };
    const auto failure = caught([&] { reduced_by(fp16_compress_wrapper({.run = late}), at::zeros({4})); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    EXPECT_EQ(failure.message, "rank 3");

    const CommHook none{.run = [](GradBucket&) { return GradFuture(); }, .name = "none"};
    refused([&] { reduced_by(fp16_compress_wrapper(none), at::zeros({4})); }, "none returned no future");
    refused([] { fp16_compress_wrapper({}); }, "empty hook");
  });
}

// ---- eight bits ----

// The formula of quantization_hooks.h, element by element.
std::vector<double> quantised_and_back(const at::Tensor& row) {
  const float* x = row.const_data_ptr<float>();
  const auto n = static_cast<std::size_t>(row.numel());
  float low = 0, high = 0;
  for (std::size_t i = 0; i < n; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  const float s = std::max((high - low) / 255.0F, std::numeric_limits<float>::epsilon());
  const float z = std::clamp(-std::nearbyintf(low / s), 0.0F, 255.0F);
  std::vector<double> back;
  for (std::size_t i = 0; i < n; ++i) {
    const float q = std::clamp(std::nearbyintf(x[i] / s) + z, 0.0F, 255.0F);
    back.push_back(double{s} * (double{q} - double{z}));
  }
  return back;
}

std::vector<double> expected_of_rows(int n_ranks, std::int64_t columns,
                                     const std::function<at::Tensor(int)>& input) {
  std::vector<double> mean;
  for (int r = 0; r < n_ranks; ++r) {
    std::size_t at = 0;
    for (const at::Tensor& row : input(r).split(columns)) {
      for (const double value : quantised_and_back(row.contiguous())) {
        if (mean.size() == at) mean.push_back(0);
        mean[at++] += value / n_ranks;
      }
    }
  }
  return mean;
}

// Rows of very different sizes, one of one sign, one of zeros.
at::Tensor uneven(int rank) {
  at::Tensor flat = gradients_of(rank, 1, kCount);
  flat.narrow(0, 0, 100).mul_(1000);
  flat.narrow(0, 512, 100).mul_(0.001);
  flat.narrow(0, 700, 50).zero_();
  return rank == 1 ? flat.abs() : flat;
}

void expect_quantised(const CommHook& hook, int rank, int n, std::int64_t columns) {
  const at::Tensor flat = uneven(rank);
  const at::Tensor result = reduced_by(hook, flat);
  EXPECT_EQ(result.const_data_ptr(), flat.const_data_ptr());
  const auto expected = expected_of_rows(n, columns, uneven);
  for (std::int64_t i = 0; i < kCount; ++i) {
    const double want = expected[static_cast<std::size_t>(i)];
    ASSERT_NEAR(flat[i].item<double>(), want, 1e-6 * std::abs(want) + 1e-4 * std::abs(flat[i].item<double>()))
        << i;
  }
  expect_same_on_all_ranks(flat);
}

TEST(QuantizationHooks, SendOneScalePerBucket) {
  for (const int n : {2, 3})
    world(n, [&](int rank) { expect_quantised(quantization_pertensor_hook(), rank, n, kCount); });
}

TEST(QuantizationHooks, SendOneScalePerRow) {
  for (const int n : {2, 3}) {
    world(n, [&](int rank) {
      expect_quantised(quantization_perchannel_hook(), rank, n, 512);
      expect_quantised(quantization_perchannel_hook({.bucket_size = 7}), rank, n, 7);
      expect_quantised(quantization_perchannel_hook({.bucket_size = 5000}), rank, n, kCount);
    });
  }
}

TEST(QuantizationHooks, WorkForOtherTypes) {
  world(2, [](int rank) {
    for (const auto dtype : {at::kDouble, at::kHalf}) {
      const at::Tensor flat = mine(rank).to(dtype);
      reduced_by(quantization_perchannel_hook(), flat);
      EXPECT_EQ(flat.scalar_type(), dtype);
      expect_close(flat, mean_over(2, mine), 1e-2);
    }
  });
}

TEST(QuantizationHooks, HandInfinityAndNaNOnToAllRanks) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    world(2, [&](int rank) {
      at::Tensor flat = mine(rank);
      if (rank == 1) flat[700] = bad;
      reduced_by(quantization_perchannel_hook(), flat);
      EXPECT_TRUE(flat.narrow(0, 512, kCount - 512).isnan().all().item<bool>());
      EXPECT_TRUE(flat.narrow(0, 0, 512).isfinite().all().item<bool>());
    });
  }
}

TEST(QuantizationHooks, RefuseRowsOfNothing) {
  world(1, [](int) {
    refused([] { quantization_perchannel_hook({.bucket_size = 0}); },
            "bucket_size must be positive, it is 0");
  });
}

// ---- post-local SGD ----

TEST(PostLocalSgd, AveragesOverAllThenInsideTheSubgroup) {
  for (const bool still_averages : {true, false}) {
    world(4, [&](int rank) {
      const auto pairs = new_subgroups(2);
      const auto state = PostLocalSGDState::create({.subgroup = pairs.mine,
                                                    .start_localSGD_iter = 2,
                                                    .post_local_gradient_allreduce = still_averages});
      const CommHook hook = post_localSGD_hook(state);
      for (int step = 0; step < 4; ++step) {
        for (std::size_t b = 0; b < 2; ++b) {
          Bucket bucket(gradients_of(rank, step, 10), {{10}}, b, b == 1);
          const at::Tensor result = reduced_by(hook, *bucket);
          const auto value = [&](int r) { return gradients_of(r, step, 10); };
          const int first = rank / 2 * 2;
          if (step < 2) expect_close(result, mean_over(4, value), 1e-6);
          if (step >= 2 && still_averages)
            expect_close(result, mean_over(2, [&](int r) { return value(first + r); }), 1e-6);
          if (step >= 2 && !still_averages) {
            EXPECT_TRUE(at::equal(result, value(rank)));
          }
        }
        EXPECT_EQ(state->iter(), step + 1);
      }
    });
  }
}

TEST(PostLocalSgd, MakesASubgroupPerHost) {
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  world(4, [](int rank) {
    const auto state = PostLocalSGDState::create();
    EXPECT_EQ(state->options().subgroup->ranks(), lockstep::testing::range(rank / 2 * 2, rank / 2 * 2 + 2));
  });
  ::unsetenv("LOCAL_WORLD_SIZE");
}

TEST(PostLocalSgd, RefusesWhatCannotWork) {
  world(2, [](int rank) {
    refused([] { PostLocalSGDState::create({.start_localSGD_iter = -1}); }, "must not be negative");
    refused([] { post_localSGD_hook(nullptr); }, "state is null");
    const Group only_zero = new_group({0});
    if (rank == 1) refused([&] { PostLocalSGDState::create({.subgroup = only_zero}); }, "not a member");
  });
}

// ---- collectives in half types ----

at::Tensor through(const at::Tensor& tensor, DQuantType type) {
  if (type == DQuantType::kBfp16) return tensor.to(at::kBFloat16).to(tensor.scalar_type());
  return at::clamp(tensor, -65504, 65504).to(at::kHalf).to(tensor.scalar_type());
}

class Quantized : public ::testing::TestWithParam<DQuantType> {};
INSTANTIATE_TEST_SUITE_P(Types, Quantized, ::testing::Values(DQuantType::kFp16, DQuantType::kBfp16));

TEST_P(Quantized, AllGatherMovesHalfTypes) {
  for (const int n : {2, 3}) {
    world(n, [&](int rank) {
      const auto input = [](int r) { return gradients_of(r, 3, 6).mul_(40'000).view({2, 3}); };
      std::vector<at::Tensor> outputs;
      for (int r = 0; r < n; ++r) outputs.push_back(at::zeros({2, 3}));
      AutoQuantize(GetParam()).all_gather(outputs, input(rank));
      for (int r = 0; r < n; ++r)
        EXPECT_TRUE(at::equal(outputs[static_cast<std::size_t>(r)], through(input(r), GetParam())));
    });
  }
}

TEST_P(Quantized, AllToAllMovesHalfTypes) {
  for (const int n : {2, 3}) {
    world(n, [&](int rank) {
      const auto part = [&](int from, int to) {
        return gradients_of(from, 4 + to, 1 + from + to).to(at::kDouble);
      };
      std::vector<at::Tensor> inputs, outputs;
      for (int r = 0; r < n; ++r) {
        inputs.push_back(part(rank, r));
        outputs.push_back(at::zeros({1 + rank + r}, at::kDouble));
      }
      AutoQuantize(GetParam()).all_to_all(outputs, inputs);
      for (int r = 0; r < n; ++r)
        EXPECT_TRUE(at::equal(outputs[static_cast<std::size_t>(r)], through(part(r, rank), GetParam())));
    });
  }
}

TEST_P(Quantized, AllToAllSingleMovesHalfTypes) {
  for (const int n : {2, 3}) {
    world(n, [&](int rank) {
      // Rank r gives r + 1 rows to everyone.
      const auto input = [&](int r) { return gradients_of(r, 5, n * (r + 1)).view({-1, 1}); };
      std::vector<std::int64_t> counts;
      for (int r = 0; r < n; ++r) counts.push_back(r + 1);
      at::Tensor output = at::zeros({n * (n + 1) / 2, 1});
      const std::vector<std::int64_t> sent(static_cast<std::size_t>(n), rank + 1);
      AutoQuantize(GetParam())
          .all_to_all_single(output, input(rank), {.output_split_sizes = counts, .input_split_sizes = sent});
      std::int64_t at = 0;
      for (int r = 0; r < n; ++r) {
        const at::Tensor want = through(input(r).narrow(0, rank * (r + 1), r + 1), GetParam());
        EXPECT_TRUE(at::equal(output.narrow(0, at, r + 1), want)) << r;
        at += r + 1;
      }
    });
  }
}

TEST(AutoQuantizeErrors, SayWhatIsNotSupported) {
  world(2, [](int rank) {
    const AutoQuantize quantize(DQuantType::kFp16);
    std::vector<at::Tensor> outputs{at::zeros({2}), at::zeros({2})};
    refused([&] { quantize.all_gather(outputs, at::zeros({2}), {.async_op = true}); },
            "async_op is not supported");
    refused([&] { quantize.all_to_all(outputs, outputs, {.async_op = true}); }, "async_op is not supported");
    refused([&] { quantize.all_to_all_single(outputs[0], outputs[1], {.async_op = true}); },
            "async_op is not supported");
    refused([&] { quantize.all_gather(outputs, at::zeros({2}, at::kInt)); }, "this one is Int");
    const Group only_zero = new_group({0});
    if (rank == 0) return;
    at::Tensor output = at::full({2}, 5.0F);
    quantize.all_to_all_single(output, at::zeros({2}), {.group = only_zero});
    EXPECT_TRUE(at::equal(output, at::full({2}, 5.0F))) << "a non-member's tensors must stay as they are";
  });
}

}  // namespace
}  // namespace lockstep
