#include "lockstep/optim/post_local_sgd_optimizer.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep {

PostLocalSGDOptimizer::PostLocalSGDOptimizer(std::unique_ptr<torch::optim::Optimizer> optim,
                                             std::shared_ptr<ModelAverager> averager)
    : OptimizerWrapper("PostLocalSGDOptimizer", std::move(optim)), averager_(std::move(averager)) {
  if (!averager_) base::raise(ErrorKind::kUsage, "PostLocalSGDOptimizer: there is no averager");
}

at::Tensor PostLocalSGDOptimizer::step(LossClosure closure) {
  at::Tensor loss = wrapped_step(std::move(closure));
  averager_->average_parameters(param_groups_);
  return loss;
}

OptimizerStateDict PostLocalSGDOptimizer::state_dict() const {
  OptimizerStateDict dict = wrapped_state_dict();
  dict.extra["step"] = averager_->step();
  return dict;
}

void PostLocalSGDOptimizer::load_state_dict(const OptimizerStateDict& dict) {
  load_wrapped_state_dict(dict);
  const auto step = dict.extra.find("step");
  const auto* number = step == dict.extra.end() ? nullptr : std::get_if<std::int64_t>(&step->second);
  if (number == nullptr) {
    base::log(LogLevel::kWarn,
              "PostLocalSGDOptimizer: the state dict has no step of an averager; it begins at 0");
  }
  averager_->set_step(number == nullptr ? 0 : *number);
}

void PostLocalSGDOptimizer::save(torch::serialize::OutputArchive& archive) const {
  write_state_dict(archive, state_dict());
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  load_state_dict(read_state_dict(archive));
}

}  // namespace lockstep
