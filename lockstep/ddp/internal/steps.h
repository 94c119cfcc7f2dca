// Optimizers that step inside backward(), once a gradient is averaged.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_set>
#include <vector>

namespace lockstep {
class FunctionalOptimizer;
}

namespace lockstep::internal {

class Steps {
 public:
  // From now on backward() does not call the optimizers these parameters have (in_backward.h): step() does. Raises kUsage
  // when a parameter of `others` has one: nobody would know when its gradient is averaged.
  void adopt(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& others);
  bool has_fused() const { return fused_ != nullptr; }
  // Once; raises kUsage for null, a second one, or a parameter that is not among `all`. Empty `only`: all of them.
  void fuse(std::shared_ptr<FunctionalOptimizer> optimizer, const std::vector<at::Tensor>& only,
            const std::vector<at::Tensor>& all);
  // Runs those of this parameter. True when its gradient is used up.
  bool step(const at::Tensor& parameter, const at::Tensor& average);

 private:
  std::unordered_set<const void*> adopted_;
  std::shared_ptr<FunctionalOptimizer> fused_;
  std::unordered_set<const void*> fused_to_;
};

}  // namespace lockstep::internal
