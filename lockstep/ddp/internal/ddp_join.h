// What the ranks of one model exchange under join(), and the background shadow of its layers.
//
// At the beginning of each forward pass every rank announces what it is about to do, ranks without input that
// they do nothing; one max-reduction tells the latter what to shadow:
//
//   with input      announce (does not wait) | forward | backward
//   without         announce, agreed (waits) | buffers | shadow of the backward pass
//
// Thread safety: none; called sequentially from join() and the model's forward passes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/join/background_shadow.h"

namespace lockstep::internal {

class DdpJoin final {
 public:
  DdpJoin(Group group, std::source_location where) : group_(std::move(group)), where_(where) {}

  // Describes a forward pass; all false for a rank without input.
  struct Iteration {
    bool active = false;
    bool with_gradients = false;
    bool synced = false;      // its backward pass is reduced
    bool in_context = false;  // of distributed autograd
  };
  struct Agreed {
    int highest_active;  // rank in the group
    bool with_gradients, synced, in_context;
  };

  // On all ranks, before the body.
  void enter();
  // Starts the announcement. `n_reductions`: completed so far.
  void announce(const Iteration& mine, std::uint64_t n_reductions);
  // Blocks until all ranks have announced.
  Agreed agreed();
  // Raises kUsage when the last announced synced forward pass was not followed by its reduction: ranks
  // without input shadow one backward pass for each.
  void check_answered(std::uint64_t n_reductions) const;
  // Collective: the highest rank that says it is the last with input.
  int last_active(bool is_last) const;

  // Layers with their own collectives: their operations are announced in a separate group and answered by a
  // thread.
  void enter_layers(const std::vector<LayerWithCollectives*>& layers);
  // This rank has exhausted its input. Later calls are no-ops.
  void shadow_layers();
  // Blocks until all ranks are done with their layers.
  void finish_layers();
  // After an exception: layers return to their own groups. No-op after finish_layers().
  void leave_layers() noexcept;

 private:
  const Group group_;
  const std::source_location where_;
  at::Tensor announced_;
  Work work_;
  // Number of reductions before the last announced synced forward pass.
  std::optional<std::uint64_t> reduced_before_;
  std::unique_ptr<BackgroundShadow> background_;  // null: no such layers
  bool entered_ = false;                          // the shadow has been entered and not finished
  bool shadows_ = false;
};

}  // namespace lockstep::internal
