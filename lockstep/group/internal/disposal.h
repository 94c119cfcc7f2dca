// Communicators end where they may block. An engine's `done` runs on a thread of the engine, and what it
// releases may be the last owner of a tensor, of the group that the tensor's memory belongs to, and so of the
// communicator the thread serves: ending that one there would wait for itself. So groups end elsewhere when
// their last owner ends inside `done`.
//
// Thread: one of the process, "ls-dispose", started by the first that is handed over and joined when the
// process exits. Thread safety: every function may be called from any thread.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::internal {

// While one lives, this thread is inside an engine's `done`.
class EngineCallback {
 public:
  EngineCallback();
  ~EngineCallback();
  EngineCallback(const EngineCallback&) = delete;
};

// Runs `end` here, or on the disposal thread when this thread is inside an engine's `done`.
void end_where_it_may_block(std::function<void()> end) noexcept;

// As std::make_shared, for what must not end inside `done`.
template <class T, class... Arguments>
std::shared_ptr<T> make_disposable(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...),
          [](T* object) { end_where_it_may_block([object] { delete object; }); }};
}

}  // namespace lockstep::internal
