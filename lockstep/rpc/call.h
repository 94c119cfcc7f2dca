// Calling registered functions on other workers, or on this one.
//
//   int five = rpc_sync("worker1", add, {2, 3});
//   Future<int> later = rpc_async("worker1", add, {2, 3}, {.timeout = 5s});
//
// Every call is (to, what, arguments, options): the arguments are one Args, written as braces where the
// function determines the types and as Args{...} where it does not, and omitted when there are none. `to` is
// a name, a number or a WorkerInfo. Arguments must stay unchanged until the future is done: their tensors are
// read while it is sent. Calls are not retried. In an autograd context (lockstep/autograd) tensors that
// require gradients carry their history across.
// Errors: kUsage for unknown workers and functions (a function unknown there comes back as RemoteError),
// RemoteError with what the function threw, kTimeout with RPCErr:1, kPeerLost naming the worker, kAborted
// after shutdown. rpc_sync raises, rpc_async's future does; errors in the call itself are raised by both
// immediately.
// Thread safety: everything here may be called from any thread, functions that run for a caller included.
#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/profile.h"

namespace lockstep::rpc {

struct CallOptions {
  std::optional<Milliseconds> timeout{};  // unset: the agent's rpc_timeout; kNoTimeout: none
};

namespace internal {

// The type on the wire of an argument that nothing else determines: a literal is sent as text.
template <class A>
using Sent = std::conditional_t<std::is_convertible_v<A, std::string> &&
                                    !std::is_same_v<std::decay_t<A>, std::nullptr_t>,
                                std::string, std::decay_t<A>>;

}  // namespace internal

// The arguments of a call: a value for each parameter, no fewer.
// Args{3, "relu"} is an Args<int, std::string>.
template <class... A>
struct Args {
  Args(A... a) : values(std::move(a)...) {}
  std::tuple<A...> values;
};
template <>
struct Args<> {
  std::tuple<> values;
};
template <class... A>
Args(A...) -> Args<internal::Sent<A>...>;

namespace internal {

// Adds it to this thread's WaitAll, if there is one.
void note_future(std::shared_ptr<FutureBase> future);

// An outgoing call, without types.
struct OutgoingCall {
  std::shared_ptr<Agent> agent;
  WorkerInfo to;
  std::string function;
  std::function<void(object::Encoder&)> encode;
  Milliseconds timeout;
  const char* mode = "rpc_async";  // of the call, for profiles
};

// The head of a call's body, and what follows it.
struct CallHead {
  std::uint64_t context = 0;
  std::uint8_t flags = 0;
  std::string_view function{};
  std::span<const std::uint8_t> extension_bytes{};
  std::span<const std::uint8_t> events{};
  std::span<const std::uint8_t> rrefs{};  // those in the object (rref_scope.h)
  std::span<const std::uint8_t> object{};
};
inline constexpr std::uint8_t kProfiled = 1;  // the answer brings events
CallHead read_call_head(std::span<const std::uint8_t> body);
// The same of a value's bytes; what only calls have is empty.
CallHead read_value_head(std::span<const std::uint8_t> body);
// Bytes before a call whose result stays behind an RRef: the ids of the RRef and the fork.
inline constexpr std::size_t kRemoteHead = 16;
// Arguments with what the extension adds.
Payload encode_call(const OutgoingCall& call);

// A value's bytes: what the extension added, events of a profiled call, the RRefs in it, then the object. For
// answers.
Payload encode_value(Agent& agent, std::uint64_t context, WorkerId to,
                     const std::function<void(object::Encoder&)>& encode,
                     const ProfileLog* profile = nullptr);
// The streams of decoded tensors are current on this thread until `transit` is destroyed.
void decode_value(Agent& agent, std::uint64_t context, WorkerId from, const Agent::Answer& answer,
                  object::DeviceTransit& transit, const std::function<void(object::Decoder&)>& decode);

// Runs a call's function: decodes, runs in the caller's context, and hands the result, or what went wrong, to
// `done`, once, perhaps later and on another thread. Does not throw.
using CallDone =
    std::function<void(const ValueType* type, std::shared_ptr<void> result, const CallFailure* failure)>;
void run_call(Agent& agent, WorkerId from, const CallHead& head, const object::Blobs& blobs, CallDone done,
              const std::shared_ptr<ProfileLog>& profile = {});
// The handler of MessageKind::kCall.
void serve_call(Request request);

// "worker1's function add".
std::string describe_call(const OutgoingCall& call);
// `future`: as in Agent::request.
void send_call(const OutgoingCall& call, Agent::OnAnswer on_answer, const FutureBase* future = nullptr);
// `next`, preceded by adding the call to this thread's profile, if there is one.
Agent::OnAnswer profiled(const OutgoingCall& call, Agent::OnAnswer next);

// Completes `promise` with the value that worker `from` answers.
template <class T>
Agent::OnAnswer end_with_answer(const std::shared_ptr<Agent>& sender, WorkerId from, Promise<T> promise) {
  const auto context = this_call().autograd_context;
  return [weak = sender->weak_from_this(), context, from, promise](Agent::Answer* answer,
                                                                   const CallFailure* failure) {
    std::vector<FutureBase::Callback> callbacks;
    const auto agent = weak.lock();
    if (failure != nullptr || !agent) {
      static const CallFailure gone{
          .failure = {.kind = ErrorKind::kAborted, .message = "the RPC agent is gone"}};
      callbacks = promise.state()->fail(failure != nullptr ? *failure : gone);
    } else {
      try {
        object::DeviceTransit transit;  // until the value is set: what uses it is ordered after these streams
        Held<T> value{};
        decode_value(*agent, context, from, *answer, transit,
                     [&](object::Decoder& decoder) { value = object::read<Held<T>>(decoder); });
        callbacks = promise.state()->set(std::move(value));
      } catch (...) {
        auto wrong = current_call_failure();
        wrong.failure.message = "the answer of " + agent->info(from).name + ": " + wrong.failure.message;
        callbacks = promise.state()->fail(std::move(wrong));
      }
    }
    if (agent) {
      agent->run_callbacks(std::move(callbacks));
    } else {
      FutureBase::run(std::move(callbacks));
    }
  };
}

template <class T>
Future<T> start_call(const OutgoingCall& call) {
  Promise<T> promise(call.agent->weak_from_this());
  send_call(call, end_with_answer<T>(call.agent, call.to.id, promise), promise.state().get());
  note_future(promise.state());
  return promise.future();
}

template <class... A>
OutgoingCall make_call(const char* mode, const Worker& to, std::string function,
                       const std::tuple<A...>& values, const CallOptions& options) {
  const auto agent = current_agent("a remote call");
  return {.agent = agent,
          .to = agent->find(to),
          .function = std::move(function),
          .encode = [&values](object::Encoder& encoder) { object::write(encoder, values); },
          .timeout = agent->timeout_or_default(options.timeout),
          .mode = mode};
}

// rpc_async and rpc_sync.
template <class R, class... A>
auto call(const char* mode, const Worker& to, const std::string& function, const std::tuple<A...>& values,
          const CallOptions& options) {
  using T = std::decay_t<typename Unwrapped<R>::type>;
  return start_call<T>(make_call(mode, to, function, values, options));
}

}  // namespace internal

template <class R, class... A>
auto rpc_async(const Worker& to, const NamedFunction<R(A...)>& fn,
               std::type_identity_t<Args<std::decay_t<A>...>> args = {}, CallOptions options = {}) {
  return internal::call<R>("rpc_async", to, fn.name, args.values, options);
}
template <class R, class... A>
auto rpc_async(const Worker& to, R (*fn)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
               CallOptions options = {}) {
  return internal::call<R>("rpc_async", to, find_function(&fn, sizeof(fn), typeid(fn)).name, args.values,
                           options);
}

template <class R, class... A>
auto rpc_sync(const Worker& to, R (*fn)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
              CallOptions options = {}) {
  const auto& name = find_function(&fn, sizeof(fn), typeid(fn)).name;
  return internal::call<R>("rpc_sync", to, name, args.values, options).wait();
}
template <class R, class... A>
auto rpc_sync(const Worker& to, const NamedFunction<R(A...)>& fn,
              std::type_identity_t<Args<std::decay_t<A>...>> args = {}, CallOptions options = {}) {
  return internal::call<R>("rpc_sync", to, fn.name, args.values, options).wait();
}

// Collects the futures of every rpc_async that this thread makes while it lives.
//
//   { WaitAll all;  rpc_async(...);  rpc_async(...);  all.wait(); }
//
// wait() throws the first failure after all are done. The destructor waits too, and logs what failed. Not
// nestable.
class WaitAll {
 public:
  WaitAll();
  ~WaitAll();
  WaitAll(const WaitAll&) = delete;
  WaitAll& operator=(const WaitAll&) = delete;
  void wait();

 private:
  friend void internal::note_future(std::shared_ptr<internal::FutureBase> future);
  std::vector<std::shared_ptr<internal::FutureBase>> futures_;
};

}  // namespace lockstep::rpc
