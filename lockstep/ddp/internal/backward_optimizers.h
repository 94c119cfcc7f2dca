// Optimizers that step inside backward(), once a gradient is averaged.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {
class FunctionalOptimizer;
class ZeroCore;
class ZeroOverlap;
}  // namespace lockstep

namespace lockstep::internal {

class BackwardOptimizers {
 public:
  ~BackwardOptimizers() { release(); }
  // Returns the adopted optimizers to backward().
  void release() noexcept;
  // From now on step(), not backward(), calls the optimizers of these parameters (in_backward.h). Raises
  // kUsage when a parameter of `others` has one: there is no notification when its gradient is averaged.
  void adopt(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& others);
  // Once; raises kUsage when its group differs from the model's, or it has a parameter that is not among
  // `all`.
  void overlap(ZeroCore& zero, const Group& group, const std::vector<at::Tensor>& all);
  // An optimizer is attached that only backward() steps.
  bool any() const { return fused_ != nullptr || overlaps_; }
  // Once; raises kUsage for null, a second one, when there is no parameter, or for one that is not among
  // `all`, has sparse gradients or its own optimizer. Empty `only`: all of them.
  void fuse(std::shared_ptr<FunctionalOptimizer> optimizer, const std::vector<at::Tensor>& only,
            const std::vector<at::Tensor>& all, const std::vector<bool>& sparse);
  // Runs the optimizers of this parameter. True when its gradient is consumed.
  bool step(const at::Tensor& parameter, const at::Tensor& average);
  // The end of a pass. Blocks until everything has been stepped on all ranks.
  void finish();

 private:
  std::unordered_map<const void*, at::Tensor> adopted_;
  std::shared_ptr<FunctionalOptimizer> fused_;
  std::unordered_set<const void*> fused_to_;
  bool overlaps_ = false;
  std::weak_ptr<ZeroOverlap> zero_;
};

}  // namespace lockstep::internal
