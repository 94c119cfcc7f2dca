// Finds the tensors inside a value: what a forward pass returns, what a hook is handed.
//
// Known: at::Tensor; vectors, arrays, lists, deques; maps and unordered maps (their values); pairs, tuples, optionals,
// variants; smart pointers to any of these. Numbers, strings and everything unknown hold no tensor. A type of your own
// joins with one function beside it, found by its namespace:
//
//   struct Output { at::Tensor logits, hidden; };
//   template <class Visit>
//   void lockstep_visit(Output& output, Visit&& visit) { visit(output.logits); visit(output.hidden); }
//
// Whatever is handed to `visit` there may again be any of the above.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

namespace lockstep {

template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit);

namespace internal {

template <class T>
concept VisitedByUser = requires(T& value, void (&visit)(at::Tensor&)) {
  lockstep_visit(value, visit);
};
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

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <class T>
inline constexpr bool is_variant = false;
template <class... T>
inline constexpr bool is_variant<std::variant<T...>> = true;

}  // namespace internal

// Calls visit(at::Tensor&) for every tensor in `value`, undefined ones too, in a fixed order. A tensor reached through a
// const path is handed out as a copy that shares its memory: replacing it there changes nothing.
template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit) {
  using T = std::remove_const_t<Value>;
  const auto inner = [&](auto& part) { visit_tensors(part, visit); };
  if constexpr (std::is_base_of_v<at::TensorBase, T>) {
    if constexpr (std::is_const_v<Value>) {
      T copy = value;
      visit(copy);
    } else {
      visit(value);
    }
  } else if constexpr (internal::VisitedByUser<Value>) {
    lockstep_visit(value, inner);
  } else if constexpr (internal::is_optional<T>) {
    if (value) inner(*value);
  } else if constexpr (internal::is_variant<T>) {
    std::visit(inner, value);
  } else if constexpr (internal::MapLike<T>) {
    for (auto& entry : value) inner(entry.second);
  } else if constexpr (internal::RangeLike<T>) {
    for (auto&& part : value) inner(part);
  } else if constexpr (internal::TupleLike<T>) {
    std::apply([&](auto&... part) { (inner(part), ...); }, value);
  } else if constexpr (internal::PointerLike<T>) {
    if (value != nullptr) inner(*value);
  }
}

}  // namespace lockstep
