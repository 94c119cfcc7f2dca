// Says what is done with every tensor that autograd saves for backward on this thread: torch's saved_tensors_hooks, which
// the C++ front end lacks.
//
// libtorch asks its engine for hooks whenever it saves a tensor, and the engine that Python brings along has some; the
// plain one has none. So the first scope of a process puts an engine of ours in front of the one that is there, by the
// call that Python uses (set_default_engine_stub). It hands everything on to that one and adds the hooks of the
// innermost scope of the thread. Without a scope that costs one look at a thread-local pointer per saved tensor.
// Thread safety: a scope belongs to the thread that opened it; scopes close in the reverse order.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace lockstep::internal {

class SavedTensorScope final {
 public:
  // Called for each tensor saved while this is the innermost scope; what it throws comes out of the operation that
  // wanted to save.
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
