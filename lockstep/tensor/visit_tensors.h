// Finds the tensors inside a value: what a forward pass returns or a hook receives.
//
// Supported: at::Tensor; vectors, arrays, lists, deques; maps and unordered maps (their values); pairs,
// tuples, optionals, variants; smart pointers to any of these; RRefs that this worker owns, once their value
// is set; c10::IValue (TorchScript) with its lists, tuples, dicts and objects. Numbers, strings and unknown
// types count as holding no tensor. A user's struct lists its members in one function beside it, found by
// argument-dependent lookup; the same function lets it be sent (object/codec.h):
//
//   struct Output { at::Tensor logits, hidden; };
//   auto lockstep_fields(lockstep::SelfOf<Output> auto& self) { return std::tie(self.logits, self.hidden); }
//
// A member may again be any of the above; members that hold no tensor may be left out if the struct is never
// sent. Thread safety: no shared state.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "lockstep/object/codec.h"

namespace c10 {
struct IValue;
}

namespace lockstep {
namespace internal {

template <class T>
concept TupleLike = requires {
  std::tuple_size<std::remove_const_t<T>>::value;
};
template <class T>
concept MapLike = requires(T& value) {
  typename T::mapped_type;
  value.begin();
};
template <class T>
concept RangeLike = requires(T& value) {
  value.begin();
  value.end();
}
&&!std::is_convertible_v<T, std::string_view>;
template <class T>
concept PointerLike = requires(T& value) {
  typename T::element_type;
  *value;
  value == nullptr;
};
// A handle to a value that may be remote: rpc::RRef, which this layer does not include.
template <class T>
concept HandleLike = requires(T& value) {
  { value.valid() } -> std::convertible_to<bool>;
  *value.local_value_if_ready();
};

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <class T>
inline constexpr bool is_variant = false;
template <class... T>
inline constexpr bool is_variant<std::variant<T...>> = true;

// A tensor that `visit` replaces is stored in new lists, tuples, dicts and objects: other holders of the old
// ones see no change.
void visit_ivalue(c10::IValue& value, const std::function<void(at::Tensor&)>& visit);
void visit_ivalue(const c10::IValue& value, const std::function<void(at::Tensor&)>& visit);

// kOwned: only tensors held by the value itself, not those it points to.
template <bool kOwned, class Value, class Visit>
void visit_in(Value& value, Visit& visit) {
  using T = std::remove_const_t<Value>;
  const auto inner = [&](auto& part) { visit_in<kOwned>(part, visit); };
  if constexpr (std::is_base_of_v<at::TensorBase, T>) {
    if constexpr (std::is_const_v<Value>) {
      T copy = value;
      visit(copy);
    } else {
      visit(value);
    }
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    visit_ivalue(value, std::ref(visit));
  } else if constexpr (object::HasFields<Value>) {
    std::apply([&](auto&... member) { (inner(member), ...); },
               object::as_fields(lockstep_fields(value)).members);
  } else if constexpr (is_optional<T>) {
    if (value) inner(*value);
  } else if constexpr (is_variant<T>) {
    std::visit(inner, value);
  } else if constexpr (HandleLike<T>) {
    if constexpr (!kOwned) {
      if (!value.valid()) return;
      if (auto* const held = value.local_value_if_ready()) inner(*held);
    }
  } else if constexpr (MapLike<T>) {
    for (auto& entry : value) inner(entry.second);
  } else if constexpr (RangeLike<T>) {
    if constexpr (!kOwned || !std::ranges::borrowed_range<T>) {
      for (auto&& part : value) inner(part);
    }
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... part) { (inner(part), ...); }, value);
  } else if constexpr (PointerLike<T>) {
    if constexpr (!kOwned) {
      if (value != nullptr) inner(*value);
    }
  }
}

}  // namespace internal

// Calls visit(at::Tensor&) for every tensor in `value`, undefined ones included, in a fixed order. A tensor
// reached through a const path is passed as a copy that shares its memory: replacing it there has no effect.
template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit) {
  internal::visit_in<false>(value, visit);
}

// The same, but skips what is behind pointers, spans and other references: a copy of a value can be modified
// this way without changing the original.
template <class Value, class Visit>
void visit_owned_tensors(Value& value, Visit&& visit) {
  internal::visit_in<true>(value, visit);
}

}  // namespace lockstep
