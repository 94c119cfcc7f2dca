// Gradients that are averaged together, outside of the buckets, when the gradient of one chosen parameter arrives.
//
// They lie in one flat buffer per element type, in the group's shared memory; .grad is a view of it. The one whose
// arrival starts the reduction is to come last: what has not arrived by then is averaged as it was.
// Thread safety: as the reducer, one thread at a time. Ownership: keeps parameters and group alive; its hook ends with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace torch::autograd {
struct Node;
}

namespace lockstep::internal {

class DelayedReduction final : public std::enable_shared_from_this<DelayedReduction> {
 public:
  // `syncs`: false while gradients only accumulate.
  static std::shared_ptr<DelayedReduction> create(std::vector<at::Tensor> parameters,
                                                  const at::Tensor& trigger,
                                                  std::shared_ptr<const bool> syncs, Group group,
                                                  std::source_location where);
  ~DelayedReduction();
  DelayedReduction(const DelayedReduction&) = delete;
  DelayedReduction& operator=(const DelayedReduction&) = delete;

  // Raises the failure of the last reduction.
  void check() const;

 private:
  class Hook;
  DelayedReduction(std::vector<at::Tensor> parameters, std::shared_ptr<const bool> syncs, Group group,
                   std::source_location where);
  void attach(const at::Tensor& trigger);
  void start();
  void finish();

  const std::vector<at::Tensor> parameters_;
  const std::shared_ptr<const bool> syncs_;
  const Group group_;
  const std::source_location where_;
  std::vector<at::Tensor> flats_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<Work> works_;
  std::shared_ptr<torch::autograd::Node> accumulator_;
  std::uintptr_t hook_key_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace lockstep::internal
