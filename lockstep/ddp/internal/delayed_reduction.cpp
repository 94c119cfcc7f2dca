#include "lockstep/ddp/internal/delayed_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/internal/flat_views.h"
#include "lockstep/tensor/detail/local_shard.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

namespace {

// The trigger comes last where it is not among the parameters.
std::vector<at::Tensor> with_trigger(const std::vector<at::Tensor>& parameters, const at::Tensor& trigger) {
  std::vector<at::Tensor> all = parameters;
  const auto is_trigger = [&](const at::Tensor& parameter) { return parameter.is_same(trigger); };
  if (std::ranges::none_of(parameters, is_trigger)) all.push_back(trigger);
  return all;
}

std::size_t trigger_index(const at::Tensor& trigger, const std::vector<at::Tensor>& parameters) {
  const auto is_trigger = [&](const at::Tensor& parameter) { return parameter.is_same(trigger); };
  return static_cast<std::size_t>(std::ranges::find_if(parameters, is_trigger) - parameters.begin());
}

}  // namespace

std::shared_ptr<DelayedReduction> DelayedReduction::create(NamedTensors parameters, const at::Tensor& trigger,
                                                           Group group, std::source_location where) {
  return std::shared_ptr<DelayedReduction>(
      new DelayedReduction(std::move(parameters), trigger, std::move(group), where));
}

// One flat tensor per element type, of which all gradients are views from now on: autograd accumulates into
// it, and nothing is copied when the reduction starts.
DelayedReduction::DelayedReduction(NamedTensors parameters, const at::Tensor& trigger, Group group,
                                   std::source_location where)
    : parameters_(std::move(parameters)),
      trigger_(trigger_index(trigger, parameters_.tensors)),
      group_(std::move(group)),
      where_(where),
      views_(parameters_.tensors.size()),
      hooks_(with_trigger(parameters_.tensors, trigger),
             [this](std::size_t index, const at::Tensor&) { on_gradient(index); }) {
  std::map<at::ScalarType, std::vector<std::size_t>> by_type;
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i)
    // Ordered by type, hence in the same order on all ranks.
    by_type[parameters_.tensors[i].scalar_type()].push_back(i);
  for (const auto& [type, indices] : by_type) {
    std::vector<at::Tensor> like;
    for (const std::size_t i : indices) like.push_back(local_shard(parameters_.tensors[i]));
    auto [flat, views] = flat_views(like, group_);
    flat.zero_();
    flats_.push_back(std::move(flat));
    for (std::size_t k = 0; k < indices.size(); ++k) views_[indices[k]] = std::move(views[k]);
  }
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
    const at::Tensor gradient = gradients_.get(parameters_.tensors[i]);
    if (gradient.defined()) views_[i].copy_(gradient);
    gradients_.set(parameters_.tensors[i], views_[i]);
  }
}

// The states of one step:
//
//   expected --trigger's gradient: start()--> in flight (works_) --end of backward: finish()--> idle
//                                                '-- another gradient of these parameters: too late, an error
void DelayedReduction::on_gradient(std::size_t index) {
  if (current_gradients()) {
    base::raise(
        ErrorKind::kUnsupported,
        "DistributedDataParallel: delay_all_reduce_named_params and a distributed autograd context do not "
        "go together");
  }
  if (!works_.empty()) {
    try {
      const bool named = index < parameters_.names.size();
      base::raise(
          ErrorKind::kUsage,
          base::cat(
              "DistributedDataParallel: the gradient of ",
              named ? parameters_.names[index] : "param_to_hook_all_reduce",
              " arrived after the delayed gradients went out, which was when param_to_hook_all_reduce had "
              "its own; "
              "name a parameter whose gradient comes once, after all of delay_all_reduce_named_params"));
    } catch (...) {
      failure_ = base::current_failure();
      throw;
    }
  }
  if (index == trigger_ && expected_ && !failure_) start();
}

// A gradient that is not the view any more (zero_grad(set_to_none), or replaced by the user) is copied back
// first.
void DelayedReduction::start() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  expected_ = false;
  try {
    for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
      const at::Tensor gradient = gradients_.get(parameters_.tensors[i]);
      if (!gradient.defined()) {
        views_[i].zero_();
      } else if (gradient.const_data_ptr() != views_[i].const_data_ptr()) {
        views_[i].copy_(gradient);
      }
      gradients_.set(parameters_.tensors[i], views_[i]);
    }
    for (const at::Tensor& flat : flats_) {
      works_.push_back(
          all_reduce(flat, {.op = ReduceOp::kAvg, .group = group_, .async_op = true, .where = where_}));
    }
  } catch (...) {
    failure_ = base::current_failure();
    throw;
  }
  // Waited for at the end of the whole backward pass, so that the reduction overlaps what is left of it.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

void DelayedReduction::finish() {
  try {
    for (const Work& work : std::exchange(works_, {})) work.wait();
  } catch (...) {
    Failure failure = base::current_failure();
    failure.message = base::cat("DistributedDataParallel, reducing delayed gradients: ", failure.message);
    failure_ = failure;
    base::raise(std::move(failure));
  }
}

void DelayedReduction::check() const {
  if (failure_) base::raise(*failure_);
  if (!works_.empty()) {
    base::raise(
        ErrorKind::kUsage,
        "DistributedDataParallel: the last backward() ended with an error before its delayed gradients "
        "were averaged; "
        "other ranks may hold other values now. Start again from a checkpoint.");
  }
}

}  // namespace lockstep::internal
