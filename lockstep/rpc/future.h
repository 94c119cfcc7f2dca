// A value that becomes available later: what rpc_async returns, and what a function returns that answers
// later.
//
//   Future<at::Tensor> sum = rpc_async("worker1", add, {a, b});
//   ...
//   sum.wait();
//
//   Promise<int> promise;                       // the other end
//   std::thread([promise] { promise.set(3); });
//   Future<int> three = promise.future();
//
// wait() blocks; done(), result() and error() never do; on_done() runs something afterwards. Work and
// AsyncTensor have the same. then() makes a further future of the value; for a Work, the then() of its
// get_future() does. Handles copy; all copies are of one value, which is set once. A future of a call always
// completes: with the value, with the callee's exception, at the call's timeout, or when the worker is gone.
// A thread that waits for a call's answer fetches arriving messages itself for a moment before it sleeps.
// Thread safety: every method may be called from any thread.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/rpc/failure.h"

namespace lockstep::rpc {

// What Future<void> holds.
struct Nothing {
  friend bool operator==(Nothing, Nothing) = default;
};

namespace internal {

class FutureBase;

// What a waiting thread does meanwhile, and who runs callbacks: an agent. Absent: it only sleeps.
class WaitHelper {
 public:
  virtual ~WaitHelper() = default;
  // Fetches messages until `over` is not zero, or for a short while.
  virtual void help(const std::atomic<std::uint8_t>& over) = 0;
  // Around sleeping: while a pool thread sleeps, another may be started.
  virtual void before_sleep() = 0;
  virtual void after_sleep() = 0;
  // What `future` waits for, for the line of a wait that lasts.
  virtual base::Awaited awaited(const FutureBase& future) const = 0;
};

class FutureBase {
 public:
  explicit FutureBase(std::weak_ptr<WaitHelper> helper) : helper_(std::move(helper)) {}
  FutureBase(const FutureBase&) = delete;
  FutureBase& operator=(const FutureBase&) = delete;
  virtual ~FutureBase() = default;

  using Callback = std::function<void()>;
  bool over() const { return over_.load(std::memory_order_acquire) != 0; }
  // False at the deadline. A wait that lasts says once (SlowWait) what for: waiting(), else what the helper
  // knows. waiting is called under no lock of the future's.
  bool wait_over(Deadline deadline, const std::function<std::string()>& waiting = {});
  // Runs it now when over, else on the thread that completes it. A callback must not throw; what it throws is
  // logged.
  void on_over(Callback callback);
  // What it failed with; null when it did not. Pre: over().
  const CallFailure* failure() const { return failure_ ? &*failure_ : nullptr; }
  // Nothing happens when it is over already. Returns callbacks for the caller to run, never under a lock.
  [[nodiscard]] std::vector<Callback> fail(CallFailure failure);
  // The failure as an exception; null also while not over().
  std::exception_ptr error() const;
  const std::weak_ptr<WaitHelper>& helper() const { return helper_; }

  static void run(std::vector<Callback> callbacks) noexcept;

 protected:
  // Ends it once, with `write` storing what it ended with; nothing when it was over.
  template <class Write>
  std::vector<Callback> end(Write&& write) {
    std::vector<Callback> callbacks;
    {
      const base::MutexLock lock(mutex_);
      if (over()) return {};
      write();
      callbacks = std::move(callbacks_);
      over_.store(1, std::memory_order_release);
      // Under the lock: whoever waits may destroy this as soon as it sees the flag and gets the lock.
      if (n_sleeping_ != 0) changed_.notify_all();
    }
    return callbacks;
  }

 private:
  base::Awaited awaited(const WaitHelper* helper, const std::function<std::string()>& waiting) const;

  std::atomic<std::uint8_t> over_{0};
  std::optional<CallFailure> failure_;  // written before over_
  const std::weak_ptr<WaitHelper> helper_;
  base::Mutex mutex_;
  base::ConditionVariable changed_;
  int n_sleeping_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::vector<Callback> callbacks_ LOCKSTEP_GUARDED_BY(mutex_);
};

template <class T>
class FutureState final : public FutureBase {
 public:
  using FutureBase::FutureBase;
  // Work of this thread on devices so far is ordered before what uses the value.
  [[nodiscard]] std::vector<Callback> set(T value) {
    auto events = object::record_device_events();
    return end([&] {
      value_.emplace(std::move(value));
      events_ = std::move(events);
    });
  }
  // Pre: over() and no failure. The calling thread's current streams are ordered after the work that made it.
  T& value() {
    if (events_) events_->order();
    return *value_;
  }
  // The value is about to be destroyed (DeviceEvents).
  void before_release() noexcept {
    if (over() && events_) events_->before_release();
  }

 private:
  std::optional<T> value_;  // written before the flag, as events_
  std::shared_ptr<object::DeviceEvents> events_;
};

template <class T>
using Held = std::conditional_t<std::is_void_v<T>, Nothing, T>;

[[noreturn]] void raise_empty_future();
[[noreturn]] void raise_not_done();
// Of Future::wait. Raises kUsage for a timeout that is zero or negative.
Deadline wait_deadline(const std::optional<Milliseconds>& timeout);
[[noreturn]] void raise_late(Milliseconds timeout);

}  // namespace internal

template <class T>
class Future;
template <class T>
inline constexpr bool is_future = false;
template <class T>
inline constexpr bool is_future<Future<T>> = true;
// int for int and for Future<int>.
template <class T>
struct Unwrapped {
  using type = T;
};
template <class T>
struct Unwrapped<Future<T>> {
  using type = T;
};

template <class T>
class Promise {
 public:
  using State = internal::FutureState<internal::Held<T>>;

  Promise() : Promise(std::weak_ptr<internal::WaitHelper>()) {}
  explicit Promise(std::weak_ptr<internal::WaitHelper> helper)
      : held_(std::make_shared<Held>(std::make_shared<State>(std::move(helper)))) {}

  Future<T> future() const { return Future<T>(state()); }
  // The first of these completes the future, later ones are ignored. Callbacks run here.
  void set(internal::Held<T> value = {}) const { State::run(state()->set(std::move(value))); }
  void fail(CallFailure failure) const { State::run(state()->fail(std::move(failure))); }
  void fail(const Error& error) const { fail(CallFailure{.failure = error.failure()}); }
  // With the current exception; call inside a catch block.
  void fail_with_current() const { fail(current_call_failure()); }
  const std::shared_ptr<State>& state() const { return held_->state; }

 private:
  // What all copies share. When the last one is destroyed before it was set, the future fails: nothing could
  // complete it any more.
  struct Held {
    explicit Held(std::shared_ptr<State> s) : state(std::move(s)) {}
    ~Held() {
      if (state->over()) return;
      State::run(state->fail(
          {.failure = {.kind = ErrorKind::kAborted, .message = "the promise of this value was dropped"}}));
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    const std::shared_ptr<State> state;
  };
  std::shared_ptr<Held> held_;
};

template <class T>
class Future {
 public:
  using State = internal::FutureState<internal::Held<T>>;
  using Value = T;

  // Empty: every method but valid() raises kUsage.
  Future() = default;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}
  // Already done.
  static Future of(internal::Held<T> value) {
    Promise<T> promise;
    promise.set(std::move(value));
    return promise.future();
  }

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state()->over(); }
  // Blocks until done(), then result(). Raises kTimeout when `timeout` passes first; unset: waits as long as
  // the call lasts, which has its own timeout.
  T wait(std::optional<Milliseconds> timeout = {}) const {
    if (!state()->wait_over(internal::wait_deadline(timeout))) internal::raise_late(*timeout);
    return result();
  }
  // The value, or throws what it failed with. Never blocks: raises kUsage while not done().
  T result() const {
    if (!done()) internal::raise_not_done();
    if (const auto* failure = state_->failure()) failure->raise();
    if constexpr (!std::is_void_v<T>) return state_->value();
  }
  // What it failed with; null while not done(), and when it has a value. Never blocks.
  std::exception_ptr error() const { return state()->error(); }

  // fn(Future) runs once, when this is done: at once on this thread if it is already. Otherwise, of a call's
  // future, on a thread of the agent, where it may block: another thread then takes the agent's messages, and
  // only further callbacks of the same future wait for it, since they run one after the other. Of a
  // Promise's, on the thread that sets it, which it blocks.
  template <class Function>
  void on_done(Function fn) const {
    // Held strongly: whoever completes it may have released it by the time the callback runs.
    state()->on_over([self = *this, fn = std::move(fn)]() mutable { fn(std::move(self)); });
  }

  // The future of fn(Future), which runs as in on_done: fn may return a value, nothing, or another future,
  // whose value it then is.
  template <class Function>
  auto then(Function fn) const {
    using Result = std::invoke_result_t<Function, Future>;
    using Value_ = typename Unwrapped<Result>::type;
    Promise<Value_> promise(state()->helper());
    state()->on_over([self = *this, fn = std::move(fn), promise]() mutable {
      try {
        if constexpr (is_future<Result>) {
          auto inner = fn(std::move(self));
          inner.forward_to(promise);
        } else if constexpr (std::is_void_v<Result>) {
          fn(std::move(self));
          promise.set();
        } else {
          promise.set(fn(std::move(self)));
        }
      } catch (...) {
        promise.fail_with_current();
      }
    });
    return promise.future();
  }

  // Completes `promise` as this completes.
  void forward_to(Promise<T> promise) const {
    state()->on_over([state = state_, promise] {
      if (const auto* failure = state->failure()) {
        promise.fail(*failure);
      } else {
        promise.set(state->value());
      }
    });
  }

  const std::shared_ptr<State>& state() const {
    if (!state_) internal::raise_empty_future();
    return state_;
  }

 private:
  std::shared_ptr<State> state_;
};

// A future of all of them, done when the last one is; failures stay in the futures themselves. torch's
// collect_all.
template <class T>
Future<std::vector<Future<T>>> collect_all(std::vector<Future<T>> futures) {
  if (futures.empty()) return Future<std::vector<Future<T>>>::of({});
  struct Gathered {
    std::vector<Future<T>> futures;
    Promise<std::vector<Future<T>>> promise;
    std::atomic<std::size_t> n_left;
  };
  const auto all = std::make_shared<Gathered>(
      futures, Promise<std::vector<Future<T>>>(futures[0].state()->helper()), futures.size());
  for (const auto& future : futures) {
    future.state()->on_over([all] {
      if (all->n_left.fetch_sub(1) == 1) all->promise.set(std::exchange(all->futures, {}));
    });
  }
  return all->promise.future();
}

// Waits for all; throws the first failure, in the order given, after all are done.
template <class Futures>
void wait_all(const Futures& futures) {
  for (const auto& future : futures) future.state()->wait_over(Deadline::never());
  for (const auto& future : futures) {
    if (const auto* failure = future.state()->failure()) failure->raise();
  }
}

}  // namespace lockstep::rpc
