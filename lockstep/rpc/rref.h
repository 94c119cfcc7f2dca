// A reference to a value on some worker, which keeps the value alive.
//
//   RRef<Counter> counter = remote<Counter>("worker1", Args{10});  // made there (remote.h)
//   counter.rpc_sync(&Counter::add, {5});                          // runs there
//   rpc_sync("worker2", use, {counter});                           // passed on; worker2 refers to it too
//   RRef<int> sum = remote("worker1", add, {2, 3});
//   int five = sum.to_here();                                      // a copy
//
// The worker that stores the value is its owner. Handles can be copied freely, and sent as arguments and
// results of RPCs, also inside containers and structs; they cannot be encoded in any other way. The value is
// destroyed with the last handle on the last worker, in whatever order messages arrive
// (docs/rpc-protocol.md). A handle received with a call can be used immediately: nothing waits for the owner
// to know of it.
// Errors: what the value's creation failed with is raised by the next use, kPeerLost once the owner is gone,
// kUsage after shutdown. Timeouts that are unset are the agent's rpc_timeout.
// Thread safety: as std::shared_ptr; the value itself is as safe as its class makes it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/rref_method.h"

namespace lockstep::rpc {

template <class T>
class RRef {
 public:
  using Value = T;

  // Empty: only valid() may be called. Can be sent, and arrives empty.
  RRef() = default;
  // Owned by this worker.
  explicit RRef(T value) requires std::is_move_constructible_v<T>
      : RRef(std::make_shared<T>(std::move(value))) {}
  explicit RRef(std::shared_ptr<T> value);
  template <class... A>
  static RRef of(A&&... arguments) {
    return RRef(std::make_shared<T>(std::forward<A>(arguments)...));
  }
  explicit RRef(std::shared_ptr<RRefState> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  const WorkerInfo& owner() const { return state_->owner; }
  const std::string& owner_name() const { return state_->owner.name; }
  bool is_owner() const { return state_->is_owner(); }
  // The owner knows of this handle. Always so at the owner; elsewhere soon after the handle was received or
  // created.
  bool confirmed_by_owner() const { return state_->confirmed(); }
  // The same for all handles on one value, on every worker.
  std::uint64_t id() const { return state_->id(); }

  // The value itself. Raises kUsage when this worker is not the owner. Waits until it is created, for the RPC
  // timeout at most.
  T& local_value() const { return *local_pointer(); }
  std::shared_ptr<T> local_pointer(std::optional<Milliseconds> timeout = {}) const;
  // Null when this worker is not the owner, or the value is not created yet.
  T* local_value_if_ready() const;
  // A copy, fetched from the owner, which waits until it is created.
  T to_here(std::optional<Milliseconds> timeout = {}) const {
    return is_owner() ? T(*local_pointer(timeout)) : to_here_async(timeout).wait();
  }
  // At the owner it lasts as long as the creation does.
  Future<T> to_here_async(std::optional<Milliseconds> timeout = {}) const;
  // Done when the value is created, or its creation has failed (torch: _get_future). kUsage for a handle
  // received from another worker.
  Future<void> get_future() const { return state_->creation(); }
  // The dynamic type of the value, perhaps derived from T, as C++ writes it. Asks the owner once.
  std::string type_name(std::optional<Milliseconds> timeout = {}) const { return state_->type_name(timeout); }

  // Runs a method (LOCKSTEP_RPC_METHOD) on the value, at the owner, once it is created. `remote` leaves the
  // result there.
  template <class R, class C, class... A>
  auto rpc_async(R (C::*method)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
                 CallOptions options = {}) const {
    return start<R>(internal::method_of<T>(method), args.values, options);
  }
  template <class R, class C, class... A>
  auto rpc_async(R (C::*method)(A...) const, std::type_identity_t<Args<std::decay_t<A>...>> args = {},
                 CallOptions options = {}) const {
    return start<R>(internal::method_of<T>(method), args.values, options);
  }
  template <class R, class C, class... A>
  auto rpc_sync(R (C::*method)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
                CallOptions options = {}) const {
    return rpc_async(method, std::move(args), options).wait();
  }
  template <class R, class C, class... A>
  auto rpc_sync(R (C::*method)(A...) const, std::type_identity_t<Args<std::decay_t<A>...>> args = {},
                CallOptions options = {}) const {
    return rpc_async(method, std::move(args), options).wait();
  }
  template <class R, class C, class... A>
  auto remote(R (C::*method)(A...), std::type_identity_t<Args<std::decay_t<A>...>> args = {},
              CallOptions options = {}) const {
    return start_remote<R>(internal::method_of<T>(method), args.values, options);
  }
  template <class R, class C, class... A>
  auto remote(R (C::*method)(A...) const, std::type_identity_t<Args<std::decay_t<A>...>> args = {},
              CallOptions options = {}) const {
    return start_remote<R>(internal::method_of<T>(method), args.values, options);
  }

  // For layers above, and the codec.
  const std::shared_ptr<RRefState>& state() const { return state_; }
  friend bool operator==(const RRef& a, const RRef& b) {
    return a.valid() == b.valid() && (!a.valid() || a.id() == b.id());
  }

 private:
  template <class Tuple>
  internal::OutgoingCall call(const char* mode, std::string function, const Tuple& values,
                              const CallOptions& options) const;
  template <class R, class Tuple>
  auto start(std::string function, const Tuple& values, const CallOptions& options) const;
  template <class R, class Tuple>
  auto start_remote(std::string function, const Tuple& values, const CallOptions& options) const;

  std::shared_ptr<RRefState> state_;
};

template <class T>
RRef(std::shared_ptr<T>) -> RRef<T>;

}  // namespace lockstep::rpc

#include "lockstep/rpc/detail/rref_inl.h"
