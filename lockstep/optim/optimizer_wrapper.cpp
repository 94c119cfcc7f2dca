#include "lockstep/optim/optimizer_wrapper.h"

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/internal/lend.h"

namespace lockstep {
namespace {

using torch::optim::Optimizer;
constexpr auto kAll = internal::Lend::What::kEverything;

std::unique_ptr<torch::optim::OptimizerOptions> defaults_of(const char* who, const Optimizer* optim) {
  if (optim == nullptr) base::raise(ErrorKind::kUsage, base::cat(who, ": there is no optimizer"));
  return optim->defaults().clone();
}

}  // namespace

OptimizerWrapper::OptimizerWrapper(const char* who, std::unique_ptr<Optimizer> optim)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, defaults_of(who, optim.get())),
      optim_(std::move(optim)) {
  param_groups_.swap(optim_->param_groups());
  std::swap(state_, optim_->state());
}

at::Tensor OptimizerWrapper::wrapped_step(LossClosure closure) {
  internal::Lend lend(*this, *optim_, kAll);
  return optim_->step(lend.outside(std::move(closure)));
}

OptimizerStateDict OptimizerWrapper::wrapped_state_dict() const {
  // Nothing changes that the caller could see: the groups are back when it returns.
  const internal::Lend lend(const_cast<OptimizerWrapper&>(*this), *optim_, kAll);
  return get_optimizer_state_dict(*optim_);
}

void OptimizerWrapper::load_wrapped_state_dict(const OptimizerStateDict& dict) {
  const internal::Lend lend(*this, *optim_, kAll);
  set_optimizer_state_dict(*optim_, dict);
}

}  // namespace lockstep
