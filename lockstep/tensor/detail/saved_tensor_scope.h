// Hooks for every tensor that autograd saves for backward on this thread: torch's saved_tensors_hooks, which
// the C++ front end lacks.
//
// libtorch asks its engine for hooks whenever it saves a tensor; Python's engine provides them, the plain one
// does not. So the first scope of a process installs an engine that wraps the current one, through the call
// that Python uses (set_default_engine_stub). It forwards everything and adds the hooks of the thread's
// innermost scope. Without a scope the cost is one thread-local load per saved tensor. Thread safety: a scope
// belongs to the thread that opened it; scopes close in the reverse order.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace lockstep::internal {

class SavedTensorScope final {
 public:
  // Called for each tensor saved while this is the innermost scope; its exceptions propagate out of the
  // operation that saves.
  using Make = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;
  explicit SavedTensorScope(Make make);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  friend class FrontEngine;
  const Make make_;
  SavedTensorScope* const outer_;
};

}  // namespace lockstep::internal
