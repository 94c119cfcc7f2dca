// replicate: data parallelism without a wrapper module. The module keeps its type and its parameters' names;
// calls go through a handle.
//
//   auto net = std::make_shared<Net>();
//   auto run = lockstep::replicate(net, {.gradient_as_bucket_view = true});
//   torch::optim::SGD sgd(net->parameters(), 0.1);          // names without "module."
//   loss_fn(run(input), target).backward();                 // the first call is collective: it sets up DDP
//
// C++ modules have no forward hooks, so calling the module itself stays local: only passes through the handle
// are averaged. Setup is deferred to the first call, so that the module may be modified, moved or loaded
// until then. Thread safety: as the module. Copies of a handle share state.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp.h"

namespace lockstep {

template <class M>
class Replicated {
 public:
  explicit Replicated(std::shared_ptr<M> module, DdpOptions options)
      : state_(std::make_shared<State>(State{std::move(module), std::move(options)})) {
    if (state_->module == nullptr) base::raise(ErrorKind::kUsage, "replicate: the module is null");
  }

  // As DistributedDataParallel's. The first call also constructs it: collective, with the errors of both.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return prepared()->forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // False: later passes accumulate gradients locally only, as inside no_sync(). True: the next one averages
  // them.
  void set_requires_gradient_sync(bool sync) {
    state_->syncs = sync;
    apply_sync();
  }
  // As DdpCore::register_comm_hook; may be called before the first forward. Raises kUsage for a second hook.
  void register_comm_hook(CommHook hook) {
    if (state_->model) return (*state_->model)->register_comm_hook(std::move(hook));
    if (!hook.run) base::raise(ErrorKind::kUsage, "register_comm_hook: the hook is empty");
    if (state_->hook)
      base::raise(ErrorKind::kUsage, "register_comm_hook: a module has one hook, and hooks can be chained");
    state_->hook = std::move(hook);
  }

  const std::shared_ptr<M>& module() const { return state_->module; }
  bool is_prepared() const { return state_->model.has_value(); }
  // The underlying model; constructs it if necessary.
  DistributedDataParallel<M>& prepared() {
    if (!state_->model) {
      state_->model.emplace(state_->module, state_->options);
      if (state_->hook) (*state_->model)->register_comm_hook(*std::exchange(state_->hook, std::nullopt));
      apply_sync();
    }
    return *state_->model;
  }

 private:
  struct State {
    std::shared_ptr<M> module;
    DdpOptions options;
    std::optional<CommHook> hook{};
    bool syncs = true;
    std::optional<DistributedDataParallel<M>> model{};
    std::unique_ptr<DdpCore::NoSync> no_sync{};
  };
  void apply_sync() {
    if (!state_->model) return;
    if (state_->syncs) {
      state_->no_sync.reset();
    } else if (!state_->no_sync) {
      state_->no_sync.reset(new DdpCore::NoSync((*state_->model)->no_sync()));
    }
  }

  std::shared_ptr<State> state_;
};

template <class M>
Replicated<M> replicate(std::shared_ptr<M> module, DdpOptions options = {}) {
  return Replicated<M>(std::move(module), std::move(options));
}
template <ModuleHolderType Holder>
auto replicate(const Holder& holder, DdpOptions options = {}) {
  return Replicated<typename Holder::ContainedType>(holder.ptr(), std::move(options));
}

}  // namespace lockstep
