// Functions that other workers may call. Only what is registered can be called; a name and typed values are
// sent, never code.
//
//   at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
//   LOCKSTEP_RPC_FUNCTION(add);                 // as "add"
//   LOCKSTEP_RPC_FUNCTION(app::mul, "mul");     // under a name of its own
//
// Both sides must know the function by the same name with the same types; arguments and results are checked
// when they are decoded. Arguments and results are anything lockstep/object can encode, RRefs included;
// references arrive as values. A function that returns Future<T> answers later with a T and frees its thread
// meanwhile (torch: async_execution).
// A program that has only the name calls through rpc::function<int(int, int)>("add").
// Thread safety: everything here may be called from any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/object/object.h"
#include "lockstep/rpc/future.h"

namespace lockstep::rpc {

// A kind of value behind a pointer: how it is encoded, and what it is called.
struct ValueType {
  const std::type_info* type;
  std::string (*name)();
  void (*encode)(object::Encoder&, const void*);  // null when it cannot be sent
  const std::type_info& (*dynamic)(const void*);  // of an object of a class that may be derived from
};

template <class T>
const ValueType* value_type() {
  static const ValueType entry{.type = &typeid(T),
                               .name =
                                   [] {
                                     if constexpr (object::Encodable<T>) {
                                       return object::Codec<T>::name();
                                     } else {
                                       return base::demangle(typeid(T).name());
                                     }
                                   },
                               .encode =
                                   [] {
                                     if constexpr (object::Encodable<T>) {
                                       return +[](object::Encoder& encoder, const void* value) {
                                         object::write(encoder, *static_cast<const T*>(value));
                                       };
                                     } else {
                                       return static_cast<void (*)(object::Encoder&, const void*)>(nullptr);
                                     }
                                   }(),
                               .dynamic = [](const void* value) -> const std::type_info& {
                                 return typeid(*static_cast<const T*>(value));
                               }};
  return &entry;
}

// How Nothing is encoded.
}  // namespace lockstep::rpc
namespace lockstep::object {
template <>
struct Codec<rpc::Nothing> {
  static std::string name() { return "nothing"; }
  static void write(Encoder& encoder, const rpc::Nothing&) { encoder.code(Code::kNothing); }
  static void read(Decoder& decoder, rpc::Nothing&) { decoder.expect(Code::kNothing, name); }
};
}  // namespace lockstep::object
namespace lockstep::rpc {

// A registered function without its types.
struct FunctionEntry {
  // Gets the result, or what was thrown; exactly once.
  using Done = std::function<void(std::shared_ptr<void> result, const CallFailure* failure)>;

  std::string name;
  std::string signature;  // "i32(i32, text)"
  const ValueType* result;
  // The arguments, as a std::tuple behind a pointer.
  std::function<std::shared_ptr<void>(object::Decoder&)> decode;
  // Throws what the function throws, or calls `done`, perhaps later.
  std::function<void(void* arguments, const Done& done)> run;
};

// Raises kUsage naming what is registered.
const FunctionEntry& find_function(const std::string& name);
// A source of functions that are not registered one by one, such as libtorch's operators
// (lockstep/remote/operator.h). Asked for names that are not registered, once each: what it returns is
// cached. Null: it has none of that name. It may raise.
using FunctionSource = std::unique_ptr<FunctionEntry> (*)(const std::string& name);
bool register_function_source(FunctionSource source);
// By address; raises kUsage saying how to register it.
const FunctionEntry& find_function(const void* key, std::size_t n_bytes, const std::type_info& type);
// Name clashes are recorded: registration runs before main, where nothing can be raised. init_rpc raises
// them.
bool add_function(FunctionEntry entry, const void* key, std::size_t n_bytes, const std::type_info& type);
// Empty when there was no clash.
std::string registration_clash();

namespace internal {

template <class T>
std::string name_of() {
  if constexpr (std::is_void_v<T>) {
    return "void";
  } else {
    return value_type<T>()->name();
  }
}

template <class R, class... A>
std::string signature() {
  std::string list;
  ((list += (list.empty() ? "" : ", ") + name_of<std::decay_t<A>>()), ...);
  return name_of<typename Unwrapped<R>::type>() + "(" + list + ")";
}

// Hands `call()`'s result to `done`.
template <class R, class Call>
void finish(Call&& call, const FunctionEntry::Done& done) {
  if constexpr (is_future<R>) {
    using T = typename Unwrapped<R>::type;
    auto future = call();
    if (!future.valid()) base::raise(ErrorKind::kUsage, "the function returned an empty Future");
    future.state()->on_over([state = future.state(), done] {
      if (const auto* failure = state->failure()) {
        done(nullptr, failure);
      } else {
        done(std::make_shared<Held<T>>(state->value()), nullptr);
      }
    });
  } else if constexpr (std::is_void_v<R>) {
    call();
    done(std::make_shared<Nothing>(), nullptr);
  } else {
    done(std::make_shared<std::decay_t<R>>(call()), nullptr);
  }
}

// A tuple that is not default constructible as a whole need not be: each argument is.
template <class R, class... A, class Function>
FunctionEntry make_entry(std::string name, Function fn) {
  using Arguments = std::tuple<std::decay_t<A>...>;
  return {.name = std::move(name),
          .signature = signature<R, A...>(),
          .result = value_type<Held<std::decay_t<typename Unwrapped<R>::type>>>(),
          .decode = [](object::Decoder& decoder) -> std::shared_ptr<void> {
            return std::make_shared<Arguments>(object::read<Arguments>(decoder));
          },
          .run =
              [fn](void* arguments, const FunctionEntry::Done& done) {
                auto& values = *static_cast<Arguments*>(arguments);
                finish<R>([&] { return std::apply(fn, std::move(values)); }, done);
              }};
}

}  // namespace internal

// `fn` may be called as `name` from now on. Registering the same function again under its name has no effect.
template <class R, class... A>
bool register_function(std::string name, R (*fn)(A...)) {
  return add_function(internal::make_entry<R, A...>(std::move(name), fn), &fn, sizeof(fn), typeid(fn));
}

#define LOCKSTEP_RPC_JOIN2(a, b) a##b
#define LOCKSTEP_RPC_JOIN(a, b) LOCKSTEP_RPC_JOIN2(a, b)
#define LOCKSTEP_RPC_NAMED(fn, name, ...)                                            \
  [[maybe_unused]] static const bool LOCKSTEP_RPC_JOIN(lockstep_rpc_, __COUNTER__) = \
      ::lockstep::rpc::register_function(name, fn)
#define LOCKSTEP_RPC_FUNCTION(...) \
  LOCKSTEP_RPC_PICK(__VA_ARGS__, LOCKSTEP_RPC_NAMED, LOCKSTEP_RPC_UNNAMED, )(__VA_ARGS__)
#define LOCKSTEP_RPC_PICK(a, b, pick, ...) pick
#define LOCKSTEP_RPC_UNNAMED(fn) LOCKSTEP_RPC_NAMED(fn, #fn)

// A function that is called by name only.
template <class Signature>
struct NamedFunction;
template <class R, class... A>
struct NamedFunction<R(A...)> {
  std::string name;
};
template <class Signature>
NamedFunction<Signature> function(std::string name) {
  return {std::move(name)};
}

}  // namespace lockstep::rpc
