// The base of optimizers that take over another one and add something to it: groups, options and state are the
// wrapper's, so that schedulers and everything torch::optim::Optimizer offers work on it, and are lent to the wrapped
// optimizer for the length of a call.
// Thread safety: as torch::optim::Optimizer, one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "lockstep/optim/optimizer_state.h"

namespace lockstep {

class OptimizerWrapper : public torch::optim::Optimizer {
 protected:
  // Takes over groups and state. Raises kUsage when there is no optimizer; `who` is for its message.
  OptimizerWrapper(const char* who, std::unique_ptr<torch::optim::Optimizer> optim);

  // The wrapped optimizer's. A closure sees the wrapper's groups in their place.
  at::Tensor wrapped_step(LossClosure closure);
  OptimizerStateDict wrapped_state_dict() const;
  void load_wrapped_state_dict(const OptimizerStateDict& state_dict);

 private:
  const std::unique_ptr<torch::optim::Optimizer> optim_;  // empty but while a call of ours runs
};

}  // namespace lockstep
