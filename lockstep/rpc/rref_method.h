// Methods that other workers may call on objects behind RRefs.
//
//   struct Counter { int add(int n); int value() const; };
//   LOCKSTEP_RPC_METHOD(&Counter::add);                      // as "Counter::add"
//   LOCKSTEP_RPC_METHOD(&app::Counter::value, "count");      // under a name of its own
//
// As with functions, both sides know the method by the same name. A method may return Future<T>: it then
// answers later. A method of a base class is registered for the class of the RRef:
// static_cast<void (Net::*)()>(&Base::step).
// Calls wait for the object to be created without blocking a thread.
// Thread safety: everything here may be called from any thread; methods of one object may run concurrently.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/function.h"

namespace lockstep::rpc {
namespace internal {

// The object a method is called on, as the first argument of the call. A user sends its id; the owner,
// calling itself, sends a whole RRef, since the object may not be registered.
struct MethodTarget {
  const RRefState* state = nullptr;     // where it is called
  std::shared_ptr<OwnedValue> value{};  // where it runs
  std::shared_ptr<RRefManager> manager{};
};

void write_target(object::Encoder& encoder, const MethodTarget& target);
void read_target(object::Decoder& decoder, MethodTarget& target);
// Runs `run` once the value is created or has failed, on this thread if it already has; what it throws goes
// to `done`.
void when_made(const MethodTarget& target, std::function<void()> run, const FunctionEntry::Done& done);

}  // namespace internal
}  // namespace lockstep::rpc
namespace lockstep::object {
template <>
struct Codec<rpc::internal::MethodTarget> {
  static std::string name() { return "the object"; }
  static void write(Encoder& encoder, const rpc::internal::MethodTarget& target) {
    rpc::internal::write_target(encoder, target);
  }
  static void read(Decoder& decoder, rpc::internal::MethodTarget& out) {
    rpc::internal::read_target(decoder, out);
  }
};
}  // namespace lockstep::object
namespace lockstep::rpc {
namespace internal {

template <class C, class R, class... A, class Method>
FunctionEntry make_method_entry(std::string name, Method method) {
  using Arguments = std::tuple<MethodTarget, std::decay_t<A>...>;
  return {.name = std::move(name),
          .signature = signature<R, MethodTarget, A...>(),
          .result = value_type<Held<std::decay_t<typename Unwrapped<R>::type>>>(),
          .decode = [](object::Decoder& decoder) -> std::shared_ptr<void> {
            return std::make_shared<Arguments>(object::read<Arguments>(decoder));
          },
          .run =
              [method](void* arguments, const FunctionEntry::Done& done) {
                auto values = std::make_shared<Arguments>(std::move(*static_cast<Arguments*>(arguments)));
                const auto run = [method, values, done] {
                  const auto object = std::get<0>(*values).value->template get<C>();
                  // A method that answers later needs its object until then.
                  const auto keep = [object, done](std::shared_ptr<void> result, const CallFailure* failure) {
                    done(std::move(result), failure);
                  };
                  finish<R>(
                      [&] {
                        return std::apply(
                            [&](MethodTarget&, auto&... rest) -> R {
                              return ((*object).*method)(std::move(rest)...);
                            },
                            *values);
                      },
                      keep);
                };
                when_made(std::get<0>(*values), run, done);
              }};
}

// The name that a method of a T is registered under, given as T's or as a base's.
template <class T, class R, class C, class... A>
std::string method_of(R (C::*method)(A...)) {
  R (T::*const own)(A...) = method;
  return find_function(&own, sizeof(own), typeid(own)).name;
}
template <class T, class R, class C, class... A>
std::string method_of(R (C::*method)(A...) const) {
  R (T::*const own)(A...) const = method;
  return find_function(&own, sizeof(own), typeid(own)).name;
}

// "Counter::add" of "&Counter::add".
inline std::string method_name(std::string text) {
  return text.substr(text.find_first_not_of("& ("));
}

}  // namespace internal

template <class R, class C, class... A>
bool register_method(std::string name, R (C::*const method)(A...)) {
  return add_function(internal::make_method_entry<C, R, A...>(internal::method_name(std::move(name)), method),
                      &method, sizeof(method), typeid(method));
}
template <class R, class C, class... A>
bool register_method(std::string name, R (C::*const method)(A...) const) {
  return add_function(
      internal::make_method_entry<const C, R, A...>(internal::method_name(std::move(name)), method), &method,
      sizeof(method), typeid(method));
}

#define LOCKSTEP_RPC_METHOD(...) \
  LOCKSTEP_RPC_PICK(__VA_ARGS__, LOCKSTEP_RPC_NAMED_METHOD, LOCKSTEP_RPC_UNNAMED_METHOD, )(__VA_ARGS__)
#define LOCKSTEP_RPC_NAMED_METHOD(method, name, ...)                                 \
  [[maybe_unused]] static const bool LOCKSTEP_RPC_JOIN(lockstep_rpc_, __COUNTER__) = \
      ::lockstep::rpc::register_method(name, method)
#define LOCKSTEP_RPC_UNNAMED_METHOD(method) LOCKSTEP_RPC_NAMED_METHOD(method, #method)

}  // namespace lockstep::rpc
