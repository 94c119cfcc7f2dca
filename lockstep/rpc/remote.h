// Creating values on other workers: the result of a function stays there, and an RRef of it is returned at
// once.
//
//   RRef<at::Tensor> sum = remote("worker1", add, {a, b});
//   RRef<Counter> counter = remote<Counter>("worker1", Args{10});  // LOCKSTEP_RPC_CLASS(Counter, int)
//
// `to` becomes the owner. Arguments must stay unchanged until the value is created. A failure there, or a
// timeout, is raised by the next use of the RRef, and fails its get_future().
// Thread safety: everything here may be called from any thread.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "lockstep/rpc/rref.h"

namespace lockstep::rpc {

namespace internal {

template <class T, class... A>
RRef<T> start_remote(const Worker& to, const std::string& function, const std::tuple<A...>& values,
                     const CallOptions& options) {
  const auto call = make_call("rpc_remote", to, function, values, options);
  return RRef<T>(rref_manager(*call.agent).start_remote(call));
}

// What remote(to, fn) creates: void leaves Nothing.
template <class R>
using Made = Held<std::decay_t<typename Unwrapped<R>::type>>;

// "new Counter".
template <class T>
std::string constructor_name() {
  return "new " + base::demangle(typeid(T).name());
}

template <class T, class... A>
FunctionEntry make_constructor_entry(std::string name) {
  using Arguments = std::tuple<std::decay_t<A>...>;
  return {.name = std::move(name),
          .signature = signature<T, A...>(),
          .result = value_type<T>(),
          .decode = [](object::Decoder& decoder) -> std::shared_ptr<void> {
            return std::make_shared<Arguments>(object::read<Arguments>(decoder));
          },
          .run =
              [](void* arguments, const FunctionEntry::Done& done) {
                auto& values = *static_cast<Arguments*>(arguments);
                done(std::apply([](auto&&... value) { return std::make_shared<T>(std::move(value)...); },
                                std::move(values)),
                     nullptr);
              }};
}

}  // namespace internal

template <class R, class... A>
auto remote(const Worker& to, R (*fn)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
            CallOptions options = {}) {
  const auto& entry = find_function(&fn, sizeof(fn), typeid(fn));
  return internal::start_remote<internal::Made<R>>(to, entry.name, args.values, options);
}
template <class R, class... A>
auto remote(const Worker& to, const NamedFunction<R(A...)>& fn,
            std::type_identity_t<Args<std::decay_t<A>...>> args = {}, CallOptions options = {}) {
  return internal::start_remote<internal::Made<R>>(to, fn.name, args.values, options);
}

// Constructs a T there. The arguments' types must be those that LOCKSTEP_RPC_CLASS names; the owner checks.
// They can be given explicitly:
// remote<Net>("worker1", Args<std::int64_t, std::string>{3, "relu"}, {.timeout = 5s}).
template <class T, class... A>
RRef<T> remote(const Worker& to, const Args<A...>& args = {}, CallOptions options = {}) {
  return internal::start_remote<T>(to, internal::constructor_name<T>(), args.values, options);
}

// T(ArgTypes...) may be constructed by other workers from now on. One constructor for each class; T need not
// be one that can be sent.
template <class T, class... A>
bool register_class() {
  const auto name = internal::constructor_name<T>();
  return add_function(internal::make_constructor_entry<T, A...>(name), name.data(), name.size(), typeid(T));
}

#define LOCKSTEP_RPC_CLASS(...)                                                      \
  [[maybe_unused]] static const bool LOCKSTEP_RPC_JOIN(lockstep_rpc_, __COUNTER__) = \
      ::lockstep::rpc::register_class<__VA_ARGS__>()

}  // namespace lockstep::rpc
