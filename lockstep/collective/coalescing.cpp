#include "lockstep/collective/coalescing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <map>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/internal/batch.h"
#include "lockstep/collective/internal/packing.h"
#include "lockstep/group/detail/work_state.h"

namespace lockstep {
namespace internal {

thread_local constinit Batch* open_batch = nullptr;

Batch* batch_of(const GroupBase& group) {
  Batch* batch = open_batch;
  while (batch != nullptr && &batch->group() != &group) batch = batch->outer();
  return batch;
}

namespace {

using Items = std::vector<BatchItem>;

// Like `other` but flat.
at::Tensor flat(std::int64_t numel, const at::Tensor& other) {
  return at::empty({numel}, at::TensorOptions().dtype(other.scalar_type()).device(other.device()));
}

// One op over a flat buffer that holds, for every rank where there is one part per rank, all items one after
// the other.
//   all_reduce      send = recv: | item 0 | item 1 | ... |
//   all_gather      send: | item 0 | item 1 |          recv: that of rank 0, then of rank 1, ...
//   reduce_scatter  send: | items for rank 0 | items for rank 1 | ...     recv: | item 0 | item 1 |
class FlatOp {
 public:
  FlatOp(const CollectiveCall& call, lockstep_op_kind kind, const Items& items, lockstep_op base,
         HeldTensors& held)
      : kind_(kind), n_ranks_(call.size()), type_(items.front().input.scalar_type()), op_(base) {
    const at::NoGradGuard no_grad;
    for (const auto& item : items) total_ += part(item).numel();
    send_ = flat(kind == LOCKSTEP_REDUCE_SCATTER ? total_ * n_ranks_ : total_, items.front().input);
    recv_ = kind == LOCKSTEP_ALL_REDUCE
                ? send_
                : flat(kind == LOCKSTEP_ALL_GATHER ? total_ * n_ranks_ : total_, send_);
    std::int64_t start = 0;
    for (const auto& item : items) {
      place(item, start, held);
      start += part(item).numel();
    }
    const bool moves = kind == LOCKSTEP_ALL_GATHER;
    const auto wire = moves ? call.wire_for_move(type_) : call.wire_for_reduce(type_, ReduceOp::kSum);
    op_.kind = kind;
    op_.dtype = wire.dtype;
    op_.count = static_cast<std::uint64_t>(total_ * wire.units);
    op_.send = send_.const_data_ptr();
    op_.recv = recv_.mutable_data_ptr();
    held.buffers.push_back(send_);
    held.buffers.push_back(recv_);
  }
  const lockstep_op& op() const { return op_; }

 private:
  // What one rank has of the item.
  const at::Tensor& part(const BatchItem& item) const {
    return kind_ == LOCKSTEP_REDUCE_SCATTER ? item.output : item.input;
  }
  // The item's place in the part of every rank: [ranks, numel].
  at::Tensor columns(const at::Tensor& buffer, std::int64_t start, std::int64_t numel) const {
    return buffer.view({n_ranks_, total_}).narrow(1, start, numel);
  }
  void place(const BatchItem& item, std::int64_t start, HeldTensors& held) const {
    const auto numel = part(item).numel();
    if (kind_ == LOCKSTEP_REDUCE_SCATTER) {
      columns(send_, start, numel).copy_(item.input.reshape({n_ranks_, numel}));
    } else {
      send_.narrow(0, start, numel).copy_(item.input.reshape({numel}));
    }
    if (kind_ == LOCKSTEP_ALL_GATHER) {
      place_gathered(item, columns(recv_, start, numel), held);
    } else {
      held.copies.emplace_back(item.output, recv_.narrow(0, start, numel).view(item.output.sizes()));
    }
  }
  // Row r of `rows` is what rank r sent.
  void place_gathered(const BatchItem& item, const at::Tensor& rows, HeldTensors& held) const {
    if (!item.outputs.empty()) {
      for (std::int64_t r = 0; r < n_ranks_; ++r) {
        const auto& output = item.outputs[static_cast<std::size_t>(r)];
        held.copies.emplace_back(output, rows[r].view(output.sizes()));
      }
      return;
    }
    const bool direct = item.output.is_contiguous();
    const auto whole = direct ? item.output : plain_like(item.output);
    held.copies.emplace_back(whole.view(rows.sizes()), rows);
    if (!direct) held.copies.emplace_back(item.output, whole);  // after the one above
  }

  const lockstep_op_kind kind_;
  const std::int64_t n_ranks_;
  const at::ScalarType type_;
  std::int64_t total_ = 0;
  at::Tensor send_, recv_;
  lockstep_op op_;
};

}  // namespace

Work start_items(CollectiveCall& call, lockstep_op_kind kind, const Items& items, Outputs outputs) {
  std::map<at::ScalarType, Items> by_type;  // the same order on every rank
  HeldTensors held;
  for (const auto& item : items) {
    by_type[item.input.scalar_type()].push_back(item);
    if (item.output.defined()) held.results.push_back(item.output);
    held.results.insert(held.results.end(), item.outputs.begin(), item.outputs.end());
  }
  std::vector<lockstep_op> ops;
  for (const auto& [type, of_type] : by_type)
    ops.push_back(FlatOp(call, kind, of_type, call.op(), held).op());
  if (outputs == Outputs::kShareMemory) held.shared = held.copies;
  return call.start_all(std::move(ops), std::move(held));
}

Batch::Batch(std::shared_ptr<GroupBase> group) : group_(std::move(group)), outer_(open_batch) {
  if (batch_of(*group_) != nullptr) {
    base::raise(ErrorKind::kUsage, base::cat("a CoalescingScope of group \"", group_->name(),
                                             "\" is open on this thread already; launch() it first"));
  }
  open_batch = this;
}

// Scopes of different groups may end in any order.
Batch::~Batch() {
  Batch** link = &open_batch;
  while (*link != nullptr && *link != this) link = &(*link)->outer_;
  if (*link == this) *link = outer_;
}

// The Work that is returned cannot be waited for: nothing has been started. It says which one can.
Work Batch::add(const CollectiveCall& call, lockstep_op_kind kind, const ReduceOp& op, BatchItem item) {
  if (item.input.scalar_type() != item.output.scalar_type())
    call.refuse(ErrorKind::kUsage, "inside a CoalescingScope input and output must have the same type");
  if (!kind_) {
    kind_ = kind;
    op_ = op;
  }
  if (*kind_ != kind || op_.kind() != op.kind()) {
    call.refuse(ErrorKind::kUsage,
                "a CoalescingScope collects one kind of operation with one reduce operation; this is another "
                "one than before. Use a scope for each");
  }
  if (!apart_.add(item.output, item.input)) {
    call.refuse(
        ErrorKind::kUsage,
        "a tensor shares memory with one that this CoalescingScope has collected already; they run as "
        "one operation, in no order. Collect each tensor once, or clone() it");
  }
  items_.push_back(std::move(item));
  return Work(std::make_shared<Work::State>(
      call.request().ended.type,
      base::cat(call.request().name,
                " was collected by a CoalescingScope; use the Work that its launch() returns")));
}

Work Batch::start(CollectiveCall& call) const {
  for (const auto& item : items_) {
    call.check(item.input, "a collected input");  // finds the part of the group that serves its device
    call.describe(item.input, true);
  }
  call.set_reduce(op_);
  return start_items(call, *kind_, items_);
}

}  // namespace internal

using internal::CollectiveCall;

CoalescingScope::CoalescingScope(CoalescingOptions options)
    : options_(std::move(options)),
      n_exceptions_(std::uncaught_exceptions()),
      batch_(std::make_unique<internal::Batch>(internal::resolve(options_.group))) {}

// While an exception unwinds nothing is launched: other ranks may not have got that far, and would wait.
CoalescingScope::~CoalescingScope() {
  if (!batch_ || std::uncaught_exceptions() > n_exceptions_) return;
  try {
    launch();
  } catch (...) {
    base::log(LogLevel::kError, base::cat("leaving a CoalescingScope: ", base::current_failure().message));
  }
}

Work CoalescingScope::launch() {
  if (!batch_) base::raise(ErrorKind::kUsage, "launch() of a CoalescingScope was called twice");
  const auto batch = std::move(batch_);
  CollectiveCall call(OpType::kCoalesced, options_);
  if (batch->empty() || !call.takes_part(true)) return {};
  return batch->start(call);
}

Work all_reduce_coalesced(std::vector<at::Tensor> tensors, AllReduceOptions options) {
  CollectiveCall call(OpType::kAllReduceCoalesced, options);
  if (!call.takes_part()) return {};
  if (tensors.empty()) call.refuse(ErrorKind::kUsage, "tensors is empty; at least one is needed");
  std::vector<internal::BatchItem> items;
  internal::OverlapCheck apart;
  auto outputs = internal::Outputs::kApart;
  for (const auto& tensor : tensors) {
    call.check_output(tensor, "tensors");
    call.wire_for_reduce(tensor.scalar_type(), options.op);
    if (!apart.add(tensor)) outputs = internal::Outputs::kShareMemory;
    items.push_back({tensor, call.scaled(tensor, options.op)});
  }
  call.describe(tensors, true);
  call.set_reduce(options.op);
  return internal::start_items(call, LOCKSTEP_ALL_REDUCE, items, outputs);
}

namespace {

void check_gathered(CollectiveCall& call, const at::Tensor& output, const at::Tensor& input, std::size_t i) {
  call.check_output(output, "output_lists");
  if (output.scalar_type() == input.scalar_type() && output.sizes() == input.sizes()) return;
  call.refuse(ErrorKind::kUsage, "an output for inputs[", i, "] has sizes ", output.sizes(), " and type ",
              c10::toString(output.scalar_type()), ", the input ", input.sizes(), " and ",
              c10::toString(input.scalar_type()), "; they must be identical");
}

}  // namespace

Work all_gather_coalesced(std::vector<std::vector<at::Tensor>> output_lists, std::vector<at::Tensor> inputs,
                          AllGatherOptions options) {
  CollectiveCall call(OpType::kAllGatherCoalesced, options);
  if (!call.takes_part()) return {};
  if (inputs.empty()) call.refuse(ErrorKind::kUsage, "inputs is empty; at least one tensor is needed");
  if (output_lists.size() != static_cast<std::size_t>(call.size())) {
    call.refuse(ErrorKind::kUsage, "output_lists has ", output_lists.size(), " lists, the group ",
                call.size(), " ranks; one each is needed");
  }
  for (const auto& list : output_lists) {
    if (list.size() == inputs.size()) continue;
    call.refuse(ErrorKind::kUsage, "a list of output_lists has ", list.size(), " tensors, inputs ",
                inputs.size(), "; they must be identical");
  }
  internal::OverlapCheck apart;
  std::vector<internal::BatchItem> items;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.check(inputs[i], "inputs");
    items.push_back({.input = inputs[i]});
    for (const auto& list : output_lists) {
      check_gathered(call, list[i], inputs[i], i);
      if (!apart.add(list[i]))
        call.refuse(ErrorKind::kUsage, "two of output_lists share memory; each needs its own");
      items.back().outputs.push_back(list[i]);
    }
  }
  call.describe(inputs, true);
  return internal::start_items(call, LOCKSTEP_ALL_GATHER, items);
}

}  // namespace lockstep
