// Gradients that are averaged together, outside of the buckets, when the gradient of one chosen parameter arrives.
//
// They lie in one flat buffer per element type, in the group's shared memory; .grad is a view of it. The one whose
// arrival starts the reduction, the trigger, comes after all of them: a delayed gradient that comes later is an error.
// Thread safety: as the reducer, one thread at a time. Ownership: keeps parameters and group alive; its hook ends with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {

class DelayedReduction final : public std::enable_shared_from_this<DelayedReduction> {
 public:
  static std::shared_ptr<DelayedReduction> create(NamedTensors parameters, const at::Tensor& trigger,
                                                  Group group, std::source_location where);
  ~DelayedReduction();
  DelayedReduction(const DelayedReduction&) = delete;
  DelayedReduction& operator=(const DelayedReduction&) = delete;

  // After a forward pass whose backward pass is to be reduced.
  void expect() { expected_ = true; }
  // Raises the failure of the last reduction, kUsage when it did not come to its end.
  void check() const;
  // Before a forward pass: hooks follow their parameters to new accumulators, which libtorch makes when data are replaced,
  // as by torch::load.
  void follow_parameters();

 private:
  class Hook;
  struct Attached {
    at::Tensor parameter;
    compat::NodePtr accumulator;
    std::uintptr_t key;
  };
  DelayedReduction(NamedTensors parameters, at::Tensor trigger, Group group, std::source_location where);
  void attach_all();
  void detach_all() noexcept;
  void attach(const at::Tensor& parameter, std::string name, bool is_trigger);
  void on_gradient(const std::string& name, bool is_trigger);
  void start();
  void finish();

  const NamedTensors parameters_;
  const at::Tensor trigger_;
  const Group group_;
  const std::source_location where_;
  std::vector<at::Tensor> flats_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<Work> works_;
  std::vector<Attached> attached_;
  bool expected_ = false;
  std::optional<Failure> failure_;
};

}  // namespace lockstep::internal
