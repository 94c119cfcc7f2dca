// The ambient state a forward pass depends on: the default random generators and autocast.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace lockstep::internal {

class ForwardState {
 public:
  // Captures this thread's current state, for the CPU and the devices of `inputs`. `rng` false: without the
  // generators.
  static ForwardState now(std::span<const at::Tensor> inputs, bool rng);

  class Restored;

 private:
  struct Stream {
    at::Generator generator;
    at::Tensor state;
  };
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  ForwardState again() const;
  void apply() const;

  std::vector<Stream> streams_;
  std::vector<Autocast> autocasts_;
  bool autocast_cache_ = true;
};

// Applies a state for its lifetime, then restores the previous one.
class ForwardState::Restored {
 public:
  explicit Restored(const ForwardState& state);
  ~Restored();
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  const ForwardState before_;
};

}  // namespace lockstep::internal
