#include "lockstep/ddp/internal/delayed_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/flat_views.h"
#include "lockstep/group/collectives.h"

namespace lockstep::internal {

// After the trigger's gradient was accumulated; the reduction outlives it.
class DelayedReduction::Hook final : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(DelayedReduction& reduction) : reduction_(reduction) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (*reduction_.syncs_) reduction_.start();
    return outputs;
  }

 private:
  DelayedReduction& reduction_;
};

std::shared_ptr<DelayedReduction> DelayedReduction::create(std::vector<at::Tensor> parameters,
                                                           const at::Tensor& trigger,
                                                           std::shared_ptr<const bool> syncs, Group group,
                                                           std::source_location where) {
  std::shared_ptr<DelayedReduction> made(
      new DelayedReduction(std::move(parameters), std::move(syncs), std::move(group), where));
  made->attach(trigger);
  return made;
}

DelayedReduction::DelayedReduction(std::vector<at::Tensor> parameters, std::shared_ptr<const bool> syncs,
                                   Group group, std::source_location where)
    : parameters_(std::move(parameters)),
      syncs_(std::move(syncs)),
      group_(std::move(group)),
      where_(where),
      views_(parameters_.size()) {
  std::map<at::ScalarType, std::vector<std::size_t>> by_type;
  for (std::size_t i = 0; i < parameters_.size(); ++i) by_type[parameters_[i].scalar_type()].push_back(i);
  for (const auto& [type, indices] : by_type) {
    std::vector<at::Tensor> like;
    for (const std::size_t i : indices) like.push_back(parameters_[i]);
    auto [flat, views] = flat_views(like, group_);
    flat.zero_();
    flats_.push_back(std::move(flat));
    for (std::size_t k = 0; k < indices.size(); ++k) views_[indices[k]] = std::move(views[k]);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].grad().defined()) views_[i].copy_(parameters_[i].grad());
    parameters_[i].mutable_grad() = views_[i];
  }
}

void DelayedReduction::attach(const at::Tensor& trigger) {
  accumulator_ = torch::autograd::impl::grad_accumulator(trigger);
  hook_key_ = accumulator_->add_post_hook(std::make_unique<Hook>(*this));
}

DelayedReduction::~DelayedReduction() {
  if (accumulator_) accumulator_->del_post_hook(hook_key_);
}

void DelayedReduction::start() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (failure_ || !works_.empty()) return;  // a trigger that is used twice fires twice
  try {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor gradient = parameters_[i].grad();
      if (!gradient.defined()) {
        views_[i].zero_();
      } else if (gradient.const_data_ptr() != views_[i].const_data_ptr()) {
        views_[i].copy_(gradient);
      }
      parameters_[i].mutable_grad() = views_[i];
    }
    for (const at::Tensor& flat : flats_) {
      works_.push_back(
          all_reduce(flat, {.op = ReduceOp::kAvg, .group = group_, .async_op = true, .where = where_}));
    }
  } catch (...) {
    failure_ = current_failure();
    throw;
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

void DelayedReduction::finish() {
  try {
    for (const Work& work : std::exchange(works_, {})) work.wait();
  } catch (...) {
    Failure failure = current_failure();
    failure.message = cat("DistributedDataParallel, reducing delayed gradients: ", failure.message);
    failure_ = failure;
    raise(std::move(failure));
  }
}

void DelayedReduction::check() const {
  if (failure_) raise(*failure_);
}

}  // namespace lockstep::internal
