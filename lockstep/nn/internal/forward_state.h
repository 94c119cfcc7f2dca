// What else a forward pass depends on: the states of the default random generators, and autocasting.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace lockstep::internal {

class ForwardState {
 public:
  // As it is now on this thread, for the CPU and the devices of `inputs`. `rng` false: leaves the generators out.
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

// Puts a state in force and, at its end, what was before it.
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
