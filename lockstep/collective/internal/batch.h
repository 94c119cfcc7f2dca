// What a CoalescingScope has collected, and how a list of tensors becomes one operation per element type.
// Private to collective/; one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/internal/overlap_check.h"
#include "lockstep/collective/reduce_op.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

// One collective of a batch: ALL_REDUCE sizes are alike; ALL_GATHER's output and REDUCE_SCATTER's input are
// wholes.
struct BatchItem {
  at::Tensor output{};
  at::Tensor input{};
  std::vector<at::Tensor> outputs{};  // ALL_GATHER: one per rank, instead of `output`
};

// Whether outputs of different items share memory. When they do, they must come out equal where they do.
enum class Outputs : std::uint8_t { kApart, kShareMemory };
// Starts all items as one operation per type, all of `kind` with call.op().reduce.
Work start_items(CollectiveCall& call, lockstep_op_kind kind, const std::vector<BatchItem>& items,
                 Outputs outputs = Outputs::kApart);

class Batch {
 public:
  // Collects on the group for this thread until it ends. Raises kUsage when another one does.
  explicit Batch(std::shared_ptr<GroupBase> group);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // Raises kUsage when it is of another kind or reduce operation than the first, or shares memory with one
  // before. Returns a Work that cannot be used.
  Work add(const CollectiveCall& call, lockstep_op_kind kind, const ReduceOp& op, BatchItem item);
  Work start(CollectiveCall& call) const;

  const GroupBase& group() const { return *group_; }
  Batch* outer() const { return outer_; }
  bool empty() const { return items_.empty(); }

 private:
  const std::shared_ptr<GroupBase> group_;
  Batch* outer_;  // this thread's next one, of another group
  std::optional<lockstep_op_kind> kind_;
  ReduceOp op_;
  std::vector<BatchItem> items_;
  OverlapCheck apart_;
};

}  // namespace lockstep::internal
