// Lets an optimizer that wraps another one remain an ordinary torch::optim::Optimizer, whose accessors are
// not virtual: the wrapper owns options and state, and lends them to the wrapped one for the duration of a
// call. Between calls the wrapped one is empty. References to options and states stay valid, and schedulers
// can use the wrapper.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <utility>

namespace lockstep::internal {

class Lend {
 public:
  enum class What : std::uint8_t {
    kEverything,  // groups, options, state
    kShare,       // options and state; both sides have equally many groups and keep their own parameters
  };
  Lend(torch::optim::Optimizer& from, torch::optim::Optimizer& to, What what)
      : from_(from), to_(to), what_(what) {
    exchange();
  }
  ~Lend() { exchange(); }
  Lend(const Lend&) = delete;
  Lend& operator=(const Lend&) = delete;

  // Wraps `closure` so that it runs with everything returned to the wrapper: it may call the wrapper's
  // zero_grad(). Must not outlive this object.
  torch::optim::Optimizer::LossClosure outside(torch::optim::Optimizer::LossClosure closure) {
    if (!closure) return closure;
    return [this, closure = std::move(closure)] {
      const Pause pause(*this);
      return closure();
    };
  }

 private:
  struct Pause {
    explicit Pause(Lend& paused) : lend(paused) { lend.exchange(); }
    ~Pause() { lend.exchange(); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
    Lend& lend;
  };
  void exchange() noexcept {
    std::swap(from_.state(), to_.state());
    from_.param_groups().swap(to_.param_groups());
    if (what_ == What::kEverything) return;
    for (std::size_t g = 0; g < from_.param_groups().size(); ++g)
      from_.param_groups()[g].params().swap(to_.param_groups()[g].params());
  }

  torch::optim::Optimizer& from_;
  torch::optim::Optimizer& to_;
  const What what_;
};

}  // namespace lockstep::internal
