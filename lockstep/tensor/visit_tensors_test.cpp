#include "lockstep/tensor/visit_tensors.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <array>
#include <map>
#include <string>
#include <vector>

namespace lockstep {
namespace {

struct Deep {
  at::Tensor first;
  std::vector<std::optional<at::Tensor>> more;
};
auto lockstep_fields(SelfOf<Deep> auto& self) {
  return std::tie(self.first, self.more);
}

TEST(VisitTensors, FindsThemInContainersAndStructs) {
  const auto one = [](double value) { return torch::full({1}, value); };
  std::tuple<int, std::string, std::pair<at::Tensor, at::Tensor>, std::map<std::string, Deep>,
             std::variant<std::monostate, at::Tensor>, std::array<at::Tensor, 2>, std::shared_ptr<at::Tensor>>
      value{1,
            "text",
            {one(1), one(2)},
            {{"a", Deep{one(3), {one(4), std::nullopt, one(5)}}}},
            one(6),
            {one(7), at::Tensor()},
            std::make_shared<at::Tensor>(one(8))};
  double sum = 0;
  int n_undefined = 0;
  visit_tensors(value, [&](at::Tensor& tensor) {
    n_undefined += tensor.defined() ? 0 : 1;
    if (tensor.defined()) sum += tensor.item<double>();
    tensor = one(10);
  });
  EXPECT_EQ(sum, 36);
  EXPECT_EQ(n_undefined, 1);
  EXPECT_EQ(std::get<3>(value).at("a").more[2]->item<double>(), 10) << "may be replaced";
  const auto fixed = value;
  visit_tensors(fixed, [](at::Tensor& tensor) { tensor = at::Tensor(); });
  EXPECT_TRUE(std::get<2>(fixed).first.defined());
}

// What rpc::RRef looks like from here.
struct Handle {
  bool valid() const { return set; }
  at::Tensor* local_value_if_ready() const { return ready ? held.get() : nullptr; }
  bool set = true, ready = true;
  std::shared_ptr<at::Tensor> held = std::make_shared<at::Tensor>(torch::ones({1}));
};

TEST(VisitTensors, FollowsAHandleOnlyToAValueThatIsReadyHere) {
  const auto n_found = [](Handle handle) {
    int n = 0;
    visit_tensors(handle, [&](at::Tensor&) { ++n; });
    return n;
  };
  EXPECT_EQ(n_found({}), 1);
  EXPECT_EQ(n_found({.ready = false}), 0);
  EXPECT_EQ(n_found({.set = false}), 0);
  Handle handle;
  visit_owned_tensors(handle, [](at::Tensor&) { ADD_FAILURE() << "a copy of a handle shares the value"; });
}

TEST(VisitIValue, ReplacesWithoutTouchingTheOldContainers) {
  const at::Tensor one = torch::ones({2});
  c10::List<at::Tensor> list;
  list.push_back(one);
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", one);
  const c10::IValue old = c10::ivalue::Tuple::create({list, dict, one, 7, c10::IValue()});
  c10::IValue value = old;
  int seen = 0;
  visit_tensors(value, [&](at::Tensor& tensor) {
    tensor = tensor * 2;
    ++seen;
  });
  EXPECT_EQ(seen, 3);
  const auto& parts = value.toTupleRef().elements();
  EXPECT_EQ(parts[0].toTensorVector()[0].sum().item<int>(), 4);
  EXPECT_EQ(parts[1].toGenericDict().at("a").toTensor().sum().item<int>(), 4);
  EXPECT_EQ(parts[2].toTensor().sum().item<int>(), 4);
  EXPECT_EQ(parts[3].toInt(), 7);
  EXPECT_TRUE(list.get(0).is_same(one));
  EXPECT_TRUE(dict.at("a").is_same(one));
}

TEST(VisitIValue, FindsTensorsInObjectsEvenInACircle) {
  const auto type = c10::ClassType::create("Pair", {}, false);
  type->addAttribute("value", c10::TensorType::get());
  type->addAttribute("other", c10::AnyType::get());
  const auto a = c10::ivalue::Object::create(c10::StrongTypePtr(nullptr, type), 2);
  const at::Tensor one = torch::ones({1});
  a->setSlot(0, one);
  a->setSlot(1, a);
  c10::IValue value = a;
  visit_tensors(value, [](at::Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_EQ(value.toObject()->getSlot(0).toTensor().item<int>(), 2);
  EXPECT_TRUE(a->getSlot(0).toTensor().is_same(one));
  a->setSlot(1, c10::IValue());  // or it would keep itself alive
}

}  // namespace
}  // namespace lockstep
