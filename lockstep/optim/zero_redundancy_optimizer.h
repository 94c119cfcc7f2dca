// ZeroRedundancyOptimizer: each rank keeps the optimizer state of its shard of the parameters only (ZeRO
// stage 1, Rajbhandari et al.), updates that shard, and broadcasts it. For Adam in a world of n that saves
// (n-1)/n of two copies of the model. Gradients must be averaged first, as DistributedDataParallel does.
//
//   lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> opt(
//       model->parameters(), torch::optim::AdamOptions(1e-3), {.parameters_as_bucket_view = true});
//   loss.backward();
//   opt.step();                       // collective
//   opt.consolidate_state_dict();     // collective; then, on rank 0:
//   if (rank == 0) torch::save(opt, "adam.pt");
//
// It is a torch::optim::Optimizer: schedulers, zero_grad and param_groups work on it, and changes of options
// take effect in the next step. Optim is any optimizer that updates every element, or every parameter,
// independently; LBFGS does not. All ranks pass the same parameters in the same order. Parameters may only be
// added, by add_param_group. Its own members (step, state_dict, owners, join) are those of ZeroCore
// (detail/zero_core.h).
// Thread safety: as torch::optim::Optimizer, one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/optim/detail/zero_core.h"
#include "lockstep/optim/zero_options.h"

namespace torch::optim {
class LBFGS;
}

namespace lockstep {

template <class Optim>
class ZeroRedundancyOptimizer final : public ZeroCore {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Optim>, "it shards a torch::optim::Optimizer");
  static_assert(
      !std::is_same_v<Optim, torch::optim::LBFGS>,
      "LBFGS looks at all parameters at once: ranks with a share each would search in different directions");

 public:
  // Groups without options use `defaults`. Raises kUsage when there is no group or this rank is not a member
  // of it; when there are no parameters; when one is undefined, not a leaf, not dense, duplicated, or of
  // another type than the first; kResource when the bucket memory cannot be allocated; what Optim raises for
  // invalid options.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ZeroRedundancyOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                          ZeroOptions options = {})
      : ZeroCore(
            groups, std::make_unique<Options>(defaults),
            [defaults](const std::vector<torch::optim::OptimizerParamGroup>& share) {
              return std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Optim>(share, defaults));
            },
            std::move(options)) {}
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, Options defaults, ZeroOptions options = {})
      : ZeroRedundancyOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{
                torch::optim::OptimizerParamGroup(std::move(params))},
            std::move(defaults), std::move(options)) {}
};

}  // namespace lockstep
