#include "lockstep/autograd/internal/context_state.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "lockstep/autograd/internal/pass.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::autograd::internal {
namespace {

// It was made in a stream of the pass; the reader uses it in its own.
void note_reader(const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.is_cpu() || !lockstep::internal::has_streams(gradient.device().type()))
    return;
  lockstep::internal::record_use(gradient, lockstep::internal::current_stream(gradient.device()));
}

}  // namespace

void ContextState::order_reader() const {
  for (const auto& events : events_) events->order();
}

void ContextState::add_events(std::shared_ptr<object::DeviceEvents> events) {
  if (!events) return;
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(events));
}

at::Tensor ContextState::get(const at::Tensor& parameter) const {
  const std::lock_guard lock(mutex_);
  order_reader();
  at::Tensor gradient = gradients_.find(parameter);
  note_reader(gradient);
  return gradient;
}

void ContextState::set(const at::Tensor& parameter, at::Tensor gradient) {
  const std::lock_guard lock(mutex_);
  gradients_.add({.tensor = parameter, .gradient = std::move(gradient)});
}

// accumulateGrad may keep the gradient's memory when it is the only user (the argument is the number of
// references it expects; with 0 it always copies).
void ContextState::accumulate(const at::Tensor& variable, const at::Tensor& gradient) {
  // It may be on its way to another worker as well; then its memory is not for the taking.
  const bool shared = gradient.has_storage() && gradient.storage().use_count() > 1;
  const std::lock_guard lock(mutex_);
  at::Tensor sum = gradients_.find(variable);
  torch::autograd::AccumulateGrad::accumulateGrad(
      variable, sum, gradient, shared ? 0 : 1,
      [&](at::Tensor&& result) { gradients_.add({.tensor = variable, .gradient = std::move(result)}); });
}

Gradients ContextState::gradients() const {
  const std::lock_guard lock(mutex_);
  order_reader();
  for (const auto& entry : gradients_) note_reader(entry.gradient);
  return gradients_;
}

void ContextState::add_send(compat::NodeOwner<SendNode> node) {
  const std::lock_guard lock(mutex_);
  sends_[node->message()] = std::move(node);
}

compat::NodeOwner<SendNode> ContextState::find_send(std::uint64_t message) const {
  const std::lock_guard lock(mutex_);
  const auto found = sends_.find(message);
  if (found == sends_.end()) {
    base::raise(ErrorKind::kUsage,
                base::cat("nothing was sent from here as message ", message, " of autograd context ", id_));
  }
  if (found->second->used_up()) {
    base::raise(
        ErrorKind::kUsage,
        "a backward pass has already run through this graph and released it; for a second one call the "
        "first with "
        "retain_graph = true");
  }
  return found->second;
}

std::vector<compat::NodeOwner<SendNode>> ContextState::open_sends() const {
  const std::lock_guard lock(mutex_);
  std::vector<compat::NodeOwner<SendNode>> open;
  for (const auto& [message, node] : sends_) {
    if (!node->used_up()) open.push_back(node);
  }
  return open;
}

std::vector<compat::NodePtr> ContextState::entry_nodes() const {
  const auto open = open_sends();
  return {open.begin(), open.end()};
}

bool ContextState::note_worker(WorkerId worker) {
  const std::lock_guard lock(mutex_);
  return workers_.insert(worker).second;
}

bool ContextState::has_worker(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  return workers_.contains(worker);
}

std::vector<WorkerId> ContextState::workers() const {
  const std::lock_guard lock(mutex_);
  return {workers_.begin(), workers_.end()};
}

std::shared_ptr<Pass> ContextState::pass() const {
  const std::lock_guard lock(mutex_);
  return pass_;
}

// `old` fails outside the lock: that rings, and may run callbacks. One pass at a time per context. The same
// number: another message of the pass that is here. Another number: the older one must have failed or been
// given up by its origin.
std::shared_ptr<Pass> ContextState::enter(std::uint64_t pass,
                                          const std::function<std::shared_ptr<Pass>()>& make) {
  std::shared_ptr<Pass> old;
  std::shared_ptr<Pass> fresh;
  {
    const std::lock_guard lock(mutex_);
    if (pass_ && pass_->head().pass == pass) return pass_;
    fresh = make();
    if (pass_ && !pass_->superseded_by(fresh->head())) {
      base::raise(ErrorKind::kUsage, base::cat("a backward pass of autograd context ", id_,
                                               " is under way; a context has one at a time"));
    }
    old = std::exchange(pass_, fresh);
  }
  if (old) {  // its runner must not add gradients beside the new one
    old->fail({.worker = fresh->head().origin,
               .failure = {.kind = ErrorKind::kAborted, .message = "another backward pass took its place"},
               .type = "lockstep::Error"});
  }
  return fresh;
}

// `gone` is destroyed after the lock: a pass holds nodes whose destructors may be deep.
void ContextState::leave(const Pass& pass) {
  std::shared_ptr<Pass> gone;
  const std::lock_guard lock(mutex_);
  if (pass_.get() == &pass) gone = std::move(pass_);
}

}  // namespace lockstep::autograd::internal
