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
  // Gives back what was adopted.
  void release() noexcept;
  // From now on backward() does not call the optimizers these parameters have (in_backward.h): step() does. Raises kUsage
  // when a parameter of `others` has one: nobody would know when its gradient is averaged.
  void adopt(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& others);
  // Once; raises kUsage when it shares no group with the model, or has a parameter that is not among `all`.
  void overlap(ZeroCore& zero, const Group& group, const std::vector<at::Tensor>& all);
  // Something steps that nobody else would step.
  bool any() const { return fused_ != nullptr || overlaps_; }
  // Once; raises kUsage for null, a second one, when there is no parameter, or for one that is not among `all`, has sparse
  // gradients or an optimizer of its own. Empty `only`: all of them.
  void fuse(std::shared_ptr<FunctionalOptimizer> optimizer, const std::vector<at::Tensor>& only,
            const std::vector<at::Tensor>& all, const std::vector<bool>& sparse);
  // Runs those of this parameter. True when its gradient is used up.
  bool step(const at::Tensor& parameter, const at::Tensor& average);
  // The end of a pass: everything has been stepped on all ranks. Blocks.
  void finish();

 private:
  std::unordered_map<const void*, at::Tensor> adopted_;
  std::shared_ptr<FunctionalOptimizer> fused_;
  std::unordered_set<const void*> fused_to_;
  bool overlaps_ = false;
  std::weak_ptr<ZeroOverlap> zero_;
};

}  // namespace lockstep::internal
