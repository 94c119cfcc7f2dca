#include "lockstep/nn/internal/forward_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

namespace lockstep::internal {
namespace {

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

at::Generator generator_of(at::Device device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                         : at::globalContext().defaultGenerator(device);
}

}  // namespace

ForwardState ForwardState::now(std::span<const at::Tensor> inputs, bool rng) {
  std::vector<at::Device> devices{at::kCPU};
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.is_meta()) continue;
    if (std::ranges::find(devices, input.device()) == devices.end()) devices.push_back(input.device());
  }
  ForwardState state;
  for (const at::Device device : devices) {
    if (rng) state.streams_.push_back({generator_of(device), {}});
    if (std::ranges::find(state.autocasts_, device.type(), &Autocast::device) == state.autocasts_.end())
      state.autocasts_.push_back({device.type(), false, at::kFloat});
  }
  return state.again();
}

// The state now of everything that this one has the state of.
ForwardState ForwardState::again() const {
  ForwardState state = *this;
  for (Stream& stream : state.streams_) stream.state = state_of(stream.generator);
  for (Autocast& autocast : state.autocasts_) {
    autocast.enabled = at::autocast::is_autocast_enabled(autocast.device);
    autocast.dtype = at::autocast::get_autocast_dtype(autocast.device);
  }
  state.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void ForwardState::apply() const {
  for (const Stream& stream : streams_) {
    at::Generator generator = stream.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(stream.state);
  }
  for (const Autocast& autocast : autocasts_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

ForwardState::Restored::Restored(const ForwardState& state) : before_(state.again()) {
  at::autocast::increment_nesting();
  state.apply();
}

ForwardState::Restored::~Restored() {
  before_.apply();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace lockstep::internal
