// Base of optimizers that wrap another one: the wrapper owns groups, options and state, so schedulers and all
// of torch::optim::Optimizer work on it, and lends them to the wrapped optimizer for the duration of a call.
// Thread safety: as torch::optim::Optimizer, one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "lockstep/optim/optimizer_state.h"

namespace lockstep {

class OptimizerWrapper : public torch::optim::Optimizer {
 protected:
  // Takes over groups and state. Raises kUsage when `optim` is null; `who` is for the message.
  OptimizerWrapper(const char* who, std::unique_ptr<torch::optim::Optimizer> optim);

  // Steps the wrapped optimizer. The closure sees the wrapper's groups intact.
  at::Tensor wrapped_step(LossClosure closure);
  OptimizerStateDict wrapped_state_dict() const;
  void load_wrapped_state_dict(const OptimizerStateDict& state_dict);

 private:
  const std::unique_ptr<torch::optim::Optimizer> optim_;  // empty except during a call
};

}  // namespace lockstep
