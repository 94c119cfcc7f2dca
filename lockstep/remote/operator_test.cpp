// ATen operators as targets of calls, between workers as threads.
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lockstep/autograd/autograd.h"
#include "lockstep/remote/operator.h"
#include "lockstep/remote/remote_testing.h"

namespace lockstep::rpc {
namespace {

using testing::caught;
using testing::on_first;
using testing::run_workers;
using testing::Workers;
using Numbers = std::vector<std::int64_t>;

at::Tensor tensor(std::vector<float> values) {
  at::Tensor out = at::zeros({static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) out[static_cast<std::int64_t>(i)].fill_(values[i]);
  return out;
}

// Raised here, without a message to the other worker.
void expect_refused(const std::string& part, const std::string& name, const OperatorArgs& args) {
  const auto failure = caught([&] { rpc_sync(1, op(name), args); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  EXPECT_NE(failure.message.find(part), std::string::npos) << failure.message;
  EXPECT_EQ(failure.message.find("WorkerInfo"), std::string::npos) << "sent: " << failure.message;
}

TEST(Operator, RunsOnTheOtherWorker) {
  run_workers(
      3,
      [](int rank, Workers&) {
        const auto a = tensor({1, 2, 3});
        const auto b = tensor({10, 20, 30});
        const int next = (rank + 1) % 3;
        EXPECT_TRUE(
            at::equal(rpc_sync<at::Tensor>(next, op("aten::add.Tensor"), {a, b}), tensor({11, 22, 33})));
        EXPECT_TRUE(at::equal(rpc_sync(rank, op("aten::mul.Tensor"), {a, b}), tensor({10, 40, 90})))
            << "to itself";
        const auto later = rpc_async(next, op("aten::neg"), {a});
        EXPECT_TRUE(at::equal(later.wait(), tensor({-1, -2, -3})));
      },
      testing::with_remote());
}

TEST(Operator, TakesArgumentsByNameAndTheRestByDefault) {
  on_first(2, [] {
    const auto a = tensor({1, 2});
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::add.Tensor"), {a, a, kw("alpha", 2)}), tensor({3, 6})));
    EXPECT_TRUE(
        at::equal(rpc_sync(1, op("aten::add.Tensor"), {kw("other", a), kw("self", a)}), tensor({2, 4})));
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::clamp"), {a, std::nullopt, 1.5}), tensor({1, 1.5})));
  });
}

TEST(Operator, TakesEveryKindOfValue) {
  on_first(2, [] {
    const auto a = tensor({1, 2, 3, 4});
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::cat"), {std::vector{a, a}}), at::cat({a, a})));
    EXPECT_EQ(rpc_sync(1, op("aten::reshape"), {a, Numbers{2, 2}}).dim(), 2);
    EXPECT_TRUE(
        at::equal(rpc_sync(1, op("aten::sum"), {a, kw("dtype", at::kLong)}), at::full({}, 10, at::kLong)));
    const auto ones =
        rpc_sync(1, op("aten::ones"), {Numbers{2, 3}, kw("dtype", at::kDouble), kw("device", at::kCPU)});
    EXPECT_TRUE(at::equal(ones, at::ones({2, 3}, at::kDouble)));
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::ones"), {Numbers{2}, kw("device", "cpu")}), at::ones({2})));
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::div.Tensor_mode"), {a, a, kw("rounding_mode", "floor")}),
                          at::ones({4})));
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::add.Scalar"), {a, at::Scalar(2)}), at::add(a, 2)));
    EXPECT_TRUE(
        at::equal(rpc_sync(1, op("aten::index.Tensor"), {a, std::vector{at::arange(2)}}), a.slice(0, 0, 2)));
    const auto pooled = rpc_sync(1, op("aten::avg_pool2d"), {at::ones({1, 1, 4, 4}), 2});
    EXPECT_TRUE(at::equal(pooled, at::ones({1, 1, 2, 2}))) << "one number for a list of two";
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::flip"), {a, Numbers{0}}), tensor({4, 3, 2, 1})));
    EXPECT_TRUE(
        at::equal(rpc_sync(1, op("aten::sum.dim_IntList"), {a, Numbers{}, true}), at::full({1}, 10.0F)));
    const auto wide = rpc_sync(1, op("aten::upsample_nearest1d.vec"),
                               {at::ones({1, 1, 4}), std::nullopt, std::vector<double>{2.0}});
    EXPECT_EQ(wide.numel(), 8);
    EXPECT_TRUE(at::equal(rpc_sync(1, op("aten::dropout"), {a, 0, false}), a)) << "int for float";
  });
}

TEST(Operator, ReturnsWhatItsSchemaSays) {
  on_first(2, [] {
    const auto a = tensor({3, 1, 2});
    const auto [values, indices] = rpc_sync<std::tuple<at::Tensor, at::Tensor>>(1, op("aten::sort"), {a});
    EXPECT_TRUE(at::equal(values, tensor({1, 2, 3})));
    EXPECT_EQ(indices[0].item<std::int64_t>(), 1);
    EXPECT_EQ((rpc_sync<std::vector<at::Tensor>>(1, op("aten::split.Tensor"), {a, 2})).size(), 2u);
    EXPECT_TRUE(rpc_sync<bool>(1, op("aten::equal"), {a, a}));
    EXPECT_EQ(rpc_sync<at::Scalar>(1, op("aten::_local_scalar_dense"), {a[0]}).toDouble(), 3.0);
    EXPECT_EQ(rpc_sync<std::int64_t>(1, op("aten::sym_size.int"), {a, 0}), 3);
  });
}

TEST(Operator, ThatDoesNotFitIsRefusedBeforeAnythingIsSent) {
  on_first(2, [] {
    const auto a = tensor({1, 2});
    expect_refused("no operator is called \"aten::no_such_thing\"", "aten::no_such_thing", {a});
    expect_refused("no operator is called \"nonsense\"", "nonsense", {a});
    expect_refused("aten::add.Tensor", "aten::add", {a, a});
    expect_refused("\"other\" is missing; the operator is aten::add.Tensor(Tensor self", "aten::add.Tensor",
                   {a});
    expect_refused("\"other\" is Tensor, which a value of type String does not fit", "aten::add.Tensor",
                   {a, "b"});
    expect_refused("by name, kw(name, value)", "aten::add.Tensor", {a, a, 2});
    expect_refused("there is no parameter \"beta\"", "aten::add.Tensor", {a, a, kw("beta", 2)});
    expect_refused("\"self\" is given twice", "aten::add.Tensor", {a, kw("self", a)});
    expect_refused("does not fit", "aten::reshape", {a, std::vector<double>{1.5}});
    expect_refused("does not fit", "aten::ones", {Numbers{1}, kw("device", "toaster")});
    expect_refused("does not fit", "aten::mm", {a, std::nullopt});
    expect_refused("opens files", "aten::from_file", {"/etc/passwd"});
  });
}

TEST(Operator, ThatDoesNotFitIsRefusedWhereItWouldRunToo) {
  on_first(2, [] {
    const auto send = [](const std::string& name, const std::vector<OperatorArg>& args) {
      return caught([&] { rpc_sync(1, function<at::Tensor(std::vector<OperatorArg>)>(name), {args}); })
          .message;
    };
    // A caller that does not look at schemas: the arguments are all of one list.
    const auto call = [](const std::string& name, const std::vector<OperatorArg>& args) {
      const auto agent = current_agent("test");
      return caught([&] {
               internal::start_call<at::Tensor>(
                   {.agent = agent,
                    .to = agent->find(1),
                    .function = name,
                    .encode = [&](object::Encoder& encoder) { object::write(encoder, args); }})
                   .wait();
             })
          .message;
    };
    const auto few = call("aten::add.Tensor", {tensor({1})});
    EXPECT_NE(few.find("\"other\" is missing"), std::string::npos) << few;
    EXPECT_NE(few.find("WorkerInfo(id=1"), std::string::npos) << few;
    EXPECT_NE(call("aten::from_file", {"x"}).find("opens files"), std::string::npos);
    EXPECT_NE(send("aten::neg", {tensor({1})}).find("aten::neg(Tensor self)"), std::string::npos);
    EXPECT_NE(call("some::thing", {}).find("no function is registered"), std::string::npos);
  });
}

TEST(Operator, LeavesItsResultThereBehindAnRRef) {
  on_first(2, [] {
    const RRef<at::Tensor> sum = remote(1, op("aten::add.Tensor"), {tensor({1, 2}), tensor({3, 4})});
    EXPECT_EQ(sum.owner_name(), "worker1");
    EXPECT_TRUE(at::equal(sum.to_here(), tensor({4, 6})));
    const auto pair = remote<std::tuple<at::Tensor, at::Tensor>>(1, op("aten::sort"), {tensor({2, 1})});
    EXPECT_TRUE(at::equal(std::get<0>(pair.to_here()), tensor({1, 2})));
    const auto failing = remote(1, op("aten::mm"), {at::ones({2, 3}), at::ones({2, 3})});
    EXPECT_NE(caught([&] { failing.to_here(); }).message.find("shapes cannot be multiplied"),
              std::string::npos);
  });
}

TEST(Operator, LetsGradientsThrough) {
  on_first(2, [] {
    const auto a = tensor({1, 2, 3}).requires_grad_();
    const auto b = tensor({4, 5, 6}).requires_grad_();
    const autograd::DistAutogradContext context;
    const auto product = rpc_sync(1, op("aten::mul.Tensor"), {a, b});
    autograd::backward(context, {rpc_sync(1, op("aten::sum"), {product})});
    const auto gradients = context.gradients();
    EXPECT_TRUE(at::equal(gradients.find(a), b));
    EXPECT_TRUE(at::equal(gradients.find(b), a));
  });
}

TEST(Operator, BringsBackWhatItRaised) {
  on_first(2, [] {
    const auto failure = caught([] { rpc_sync(1, op("aten::mm"), {at::ones({2, 3}), at::ones({2, 3})}); });
    EXPECT_NE(failure.message.find("On WorkerInfo(id=1, name=worker1)"), std::string::npos)
        << failure.message;
    EXPECT_NE(failure.message.find("shapes cannot be multiplied"), std::string::npos) << failure.message;
    EXPECT_EQ(failure.message.find("Exception raised from"), std::string::npos) << "libtorch's stack";
  });
}

TEST(Operator, ResultOfAnotherTypeIsRefused) {
  on_first(2, [] {
    const auto failure = caught([] { rpc_sync<double>(1, op("aten::neg"), {tensor({1})}); });
    EXPECT_NE(failure.message.find("expected f64, got tensor"), std::string::npos) << failure.message;
  });
}

}  // namespace
}  // namespace lockstep::rpc
