#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/tensor/visit_tensors.h"

namespace lockstep::internal {
namespace {

// Each member is true when something was replaced; then `value` is another one, and the old one is as it was.
class Replacement {
 public:
  explicit Replacement(const std::function<void(at::Tensor&)>& visit) : visit_(visit) {}

  bool in(c10::IValue& value) {
    if (value.isTensor()) return in_tensor(value);
    if (value.isTuple()) return in_tuple(value);
    if (value.isList()) return in_list(value);
    if (value.isGenericDict()) return in_dict(value);
    // A module is no value: its tensors are its state.
    if (value.isObject() && !value.isModule() && !value.isCustomClass()) return in_object(value);
    return false;
  }

 private:
  bool in_all(std::vector<c10::IValue>& values) {
    bool replaced = false;
    for (c10::IValue& value : values) replaced = in(value) || replaced;
    return replaced;
  }

  bool in_tensor(c10::IValue& value) {
    at::Tensor tensor = value.toTensor();
    visit_(tensor);
    if (tensor.is_same(value.toTensor())) return false;
    value = std::move(tensor);
    return true;
  }

  bool in_tuple(c10::IValue& value) {
    std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    if (!in_all(elements)) return false;
    value = c10::ivalue::Tuple::createNamed(std::move(elements), value.toTupleRef().type());
    return true;
  }

  bool in_list(c10::IValue& value) {
    std::vector<c10::IValue> elements = value.toListRef().vec();
    if (!in_all(elements)) return false;
    c10::impl::GenericList list(value.toList().elementType());
    for (c10::IValue& element : elements) list.push_back(std::move(element));
    value = std::move(list);
    return true;
  }

  bool in_dict(c10::IValue& value) {
    const c10::impl::GenericDict old = value.toGenericDict();
    std::vector<c10::IValue> entries;
    for (const auto& entry : old) entries.push_back(entry.value());
    if (!in_all(entries)) return false;
    c10::impl::GenericDict dict(old.keyType(), old.valueType());
    std::size_t next = 0;
    for (const auto& entry : old) dict.insert(entry.key(), std::move(entries[next++]));
    value = std::move(dict);
    return true;
  }

  bool in_object(c10::IValue& value) {
    const auto old = value.toObject();
    if (std::ranges::find(open_, old.get()) != open_.end()) return false;  // objects may form a circle
    open_.push_back(old.get());
    std::vector<c10::IValue> slots = old->slots();
    const bool replaced = in_all(slots);
    open_.pop_back();
    if (!replaced) return false;
    const auto object = old->copy();
    for (std::size_t i = 0; i < slots.size(); ++i) object->setSlot(i, std::move(slots[i]));
    value = object;
    return true;
  }

  const std::function<void(at::Tensor&)>& visit_;
  std::vector<const c10::ivalue::Object*> open_;
};

}  // namespace

void visit_ivalue(c10::IValue& value, const std::function<void(at::Tensor&)>& visit) {
  Replacement(visit).in(value);
}

void visit_ivalue(const c10::IValue& value, const std::function<void(at::Tensor&)>& visit) {
  c10::IValue copy = value;
  Replacement(visit).in(copy);
}

}  // namespace lockstep::internal
