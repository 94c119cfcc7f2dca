#include "lockstep/ddp/internal/delayed_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/flat_views.h"
#include "lockstep/group/collectives.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

// After a gradient was accumulated; the reduction outlives it.
class DelayedReduction::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(DelayedReduction& reduction, std::string name, bool is_trigger)
      : reduction_(reduction), name_(std::move(name)), is_trigger_(is_trigger) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    reduction_.on_gradient(name_, is_trigger_);
    return outputs;
  }

 private:
  DelayedReduction& reduction_;
  const std::string name_;
  const bool is_trigger_;
};

std::shared_ptr<DelayedReduction> DelayedReduction::create(NamedTensors parameters, const at::Tensor& trigger,
                                                           Group group, std::source_location where) {
  std::shared_ptr<DelayedReduction> made(
      new DelayedReduction(std::move(parameters), trigger, std::move(group), where));
  made->attach_all();
  return made;
}

void DelayedReduction::attach_all() {
  bool triggers = false;
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
    const bool is_trigger = parameters_.tensors[i].is_same(trigger_);
    attach(parameters_.tensors[i], parameters_.names[i], is_trigger);
    triggers = triggers || is_trigger;
  }
  if (!triggers) attach(trigger_, "param_to_hook_all_reduce", true);
}

void DelayedReduction::detach_all() noexcept {
  for (const Attached& attached : attached_) attached.accumulator->del_post_hook(attached.key);
  attached_.clear();
}

void DelayedReduction::follow_parameters() {
  const auto current = [](const Attached& attached) {
    return torch::autograd::impl::try_get_grad_accumulator(attached.parameter) == attached.accumulator;
  };
  if (std::ranges::all_of(attached_, current)) return;
  detach_all();
  attach_all();
}

DelayedReduction::DelayedReduction(NamedTensors parameters, at::Tensor trigger, Group group,
                                   std::source_location where)
    : parameters_(std::move(parameters)),
      trigger_(std::move(trigger)),
      group_(std::move(group)),
      where_(where),
      views_(parameters_.tensors.size()) {
  std::map<at::ScalarType, std::vector<std::size_t>> by_type;
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i)
    by_type[parameters_.tensors[i].scalar_type()].push_back(i);
  for (const auto& [type, indices] : by_type) {
    std::vector<at::Tensor> like;
    for (const std::size_t i : indices) like.push_back(parameters_.tensors[i]);
    auto [flat, views] = flat_views(like, group_);
    flat.zero_();
    flats_.push_back(std::move(flat));
    for (std::size_t k = 0; k < indices.size(); ++k) views_[indices[k]] = std::move(views[k]);
  }
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
    if (parameters_.tensors[i].grad().defined()) views_[i].copy_(parameters_.tensors[i].grad());
    parameters_.tensors[i].mutable_grad() = views_[i];
  }
}

void DelayedReduction::attach(const at::Tensor& parameter, std::string name, bool is_trigger) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const auto key = accumulator->add_post_hook(std::make_unique<Hook>(*this, std::move(name), is_trigger));
  attached_.push_back({parameter, std::move(accumulator), key});
}

DelayedReduction::~DelayedReduction() {
  detach_all();
}

void DelayedReduction::on_gradient(const std::string& name, bool is_trigger) {
  if (current_gradients()) {
    raise(ErrorKind::kUnsupported,
          "DistributedDataParallel: delay_all_reduce_named_params and a distributed autograd context do not "
          "go together");
  }
  if (!works_.empty()) {
    try {
      raise(ErrorKind::kUsage,
            cat("DistributedDataParallel: the gradient of ", name,
                " arrived after the delayed gradients went out, which was when param_to_hook_all_reduce had "
                "its own; "
                "name a parameter whose gradient comes once, after all of delay_all_reduce_named_params"));
    } catch (...) {
      failure_ = current_failure();
      throw;
    }
  }
  if (is_trigger && expected_ && !failure_) start();
}

void DelayedReduction::start() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  expected_ = false;
  try {
    for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
      const at::Tensor gradient = parameters_.tensors[i].grad();
      if (!gradient.defined()) {
        views_[i].zero_();
      } else if (gradient.const_data_ptr() != views_[i].const_data_ptr()) {
        views_[i].copy_(gradient);
      }
      parameters_.tensors[i].mutable_grad() = views_[i];
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
  if (!works_.empty()) {
    raise(ErrorKind::kUsage,
          "DistributedDataParallel: the last backward() ended with an error before its delayed gradients "
          "were averaged; "
          "other ranks may hold other values now. Start again from a checkpoint.");
  }
}

}  // namespace lockstep::internal
