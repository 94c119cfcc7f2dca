// The bodies of RRef's templates, and its codec. Included by rref.h.
// Thread safety: as rref.h.
#pragma once

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/detail/rref_scope.h"
#include "lockstep/rpc/rref.h"

namespace lockstep::rpc {

template <class T>
RRef<T>::RRef(std::shared_ptr<T> value) {
  if (!value) base::raise(ErrorKind::kUsage, "an RRef cannot be made of a null pointer");
  state_ = rref_manager(*current_agent("an RRef")).own(value_type<T>(), std::move(value));
}

template <class T>
std::shared_ptr<T> RRef<T>::local_pointer(std::optional<Milliseconds> timeout) const {
  state_->wait_made(timeout);
  return state_->value->template get<T>();
}

template <class T>
T* RRef<T>::local_value_if_ready() const {
  if (!state_->is_owner() || !state_->value->over()) return nullptr;
  if (state_->value->promise.state()->failure() != nullptr) return nullptr;
  return state_->value->template get<T>().get();
}

template <class T>
Future<T> RRef<T>::to_here_async(std::optional<Milliseconds> timeout) const {
  static_assert(
      object::Encodable<T>,
      "to_here() copies the value, and this type cannot be sent: call its methods through the RRef");
  state_->check();
  const auto agent = state_->manager->agent_for("to_here");
  if (state_->is_owner()) {
    const Future<std::shared_ptr<void>> made(state_->value->promise.state());
    return made.then([value = state_->value](const auto&) { return T(*value->template get<T>()); });
  }
  Promise<T> promise(agent->weak_from_this());
  state_->manager->fetch(*state_, RRefManager::Ask::kValue, timeout,
                         internal::end_with_answer<T>(agent, owner().id, promise), promise.state().get());
  auto future = promise.future();
  future.state()->on_over([keep = state_] {});  // the owner must find the value when the question comes
  return future;
}

template <class T>
template <class Tuple>
internal::OutgoingCall RRef<T>::call(const char* mode, std::string function, const Tuple& values,
                                     const CallOptions& options) const {
  state_->check();
  const auto agent = state_->manager->agent_for("a call through an RRef");
  return {
      .agent = agent,
      .to = state_->owner,
      .function = std::move(function),
      .encode =
          [this, &values](object::Encoder& encoder) {
            const internal::MethodTarget target{.state = state_.get()};
            encoder.code(object::Code::kTuple).put(static_cast<std::uint32_t>(1 + std::tuple_size_v<Tuple>));
            const object::Encoder::Deeper deeper(encoder);
            object::write(encoder, target);
            std::apply([&](const auto&... value) { (object::write(encoder, value), ...); }, values);
          },
      .timeout = agent->timeout_or_default(options.timeout),
      .mode = mode};
}

template <class T>
template <class R, class Tuple>
auto RRef<T>::start(std::string function, const Tuple& values, const CallOptions& options) const {
  using Result = std::decay_t<typename Unwrapped<R>::type>;
  auto future = internal::start_call<Result>(call("rpc_async", std::move(function), values, options));
  future.state()->on_over([keep = state_] {});  // the owner must find the value when the call comes
  return future;
}

template <class T>
template <class R, class Tuple>
auto RRef<T>::start_remote(std::string function, const Tuple& values, const CallOptions& options) const {
  using Result = internal::Held<std::decay_t<typename Unwrapped<R>::type>>;
  auto made = state_->manager->start_remote(call("rpc_remote", std::move(function), values, options));
  made->created->state()->on_over([keep = state_] {});
  return RRef<Result>(std::move(made));
}

}  // namespace lockstep::rpc

namespace lockstep::object {

template <class T>
struct Codec<rpc::RRef<T>> {
  static constexpr StructInfo kInfo{.name = "lockstep.RRef", .version = 1, .members = "place type"};

  static std::string name() { return "RRef of " + rpc::value_type<T>()->name(); }
  static void write(Encoder& encoder, const rpc::RRef<T>& rref) {
    if (!rref.valid()) {
      encoder.code(Code::kNothing);
      return;
    }
    const std::uint32_t place = rpc::internal::SendScope::add(*rref.state());
    encoder.code(Code::kStruct).sized(kInfo.name).put(kInfo.version).put(std::uint32_t{2});
    const Encoder::Deeper deeper(encoder);
    object::write(encoder, place);
    object::write(encoder, std::string(typeid(T).name()));
  }
  static void read(Decoder& decoder, rpc::RRef<T>& out) {
    if (decoder.peek() == Code::kNothing) {
      decoder.expect(Code::kNothing, name);
      out = {};
      return;
    }
    expect_struct(decoder, kInfo, 2);
    const Decoder::Step step(decoder, "RRef");
    const auto place = object::read<std::uint32_t>(decoder);
    const auto type = object::read<std::string>(decoder);
    if (type != typeid(T).name()) {
      decoder.refuse("expected an RRef of ", base::demangle(typeid(T).name()), ", got one of ",
                     base::demangle(type.c_str()));
    }
    out = rpc::RRef<T>(rpc::internal::ReceiveScope::get(place));
  }
};

}  // namespace lockstep::object
