// How an optimizer that wraps another one stays an ordinary torch::optim::Optimizer, whose accessors are not virtual:
// the wrapper owns options and state, and lends them to the wrapped one for the length of a call. Between calls the
// wrapped one is empty. References to options and states stay valid, and schedulers may be given the wrapper.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <utility>

namespace lockstep::internal {

class Lend {
 public:
  enum class What : std::uint8_t {
    kEverything,  // groups, options, state
    kShare,       // options and state; both sides have as many groups and keep their own parameters
  };
  Lend(torch::optim::Optimizer& from, torch::optim::Optimizer& to, What what)
      : from_(from), to_(to), what_(what) {
    exchange();
  }
  ~Lend() { exchange(); }
  Lend(const Lend&) = delete;
  Lend& operator=(const Lend&) = delete;

  // A closure that sees everything back in its place: it may well call the wrapper's zero_grad(). Lives no longer than
  // this object.
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
