#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <optional>
#include <vector>

#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/internal/packing.h"
#include "lockstep/collective/internal/sparse.h"

namespace lockstep::internal {
namespace {

// What must be alike on every rank, as one number.
std::int64_t fingerprint(const at::Tensor& tensor) {
  std::uint64_t mixed = 1469598103934665603u;  // FNV-1a
  const auto mix = [&](std::int64_t value) {
    mixed = (mixed ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
  };
  mix(static_cast<std::int64_t>(tensor.scalar_type()));
  mix(tensor.sparse_dim());
  for (const auto size : tensor.sizes()) mix(size);
  return static_cast<std::int64_t>(mixed);
}

void check_sparse(const CollectiveCall& call, const at::Tensor& tensor, const ReduceOp& op) {
  if (!tensor.device().is_cpu()) {
    call.refuse(ErrorKind::kUnsupported, "tensor is on ", tensor.device().str(),
                "; sparse tensors are reduced on the CPU");
  }
  if (op.kind() != ReduceOp::kSum) {
    call.refuse(ErrorKind::kUsage, "sparse tensors are reduced with SUM only, not with ", name_of(op.kind()),
                "; use to_dense() for it");
  }
}

// How many entries every rank has. Blocks, and raises kUsage on all ranks when their tensors are not alike.
std::vector<std::int64_t> exchange_entries(const CollectiveCall& call, const at::Tensor& tensor,
                                           std::int64_t n_entries, const AllReduceOptions& options) {
  const std::vector<std::int64_t> mine{n_entries, fingerprint(tensor)};
  const auto all = at::empty({call.size(), 2}, at::kLong);
  all_gather_into_tensor(all, at::tensor(mine, at::kLong).view({1, 2}),
                         {.group = options.group, .timeout = options.timeout, .where = options.where});
  std::vector<std::int64_t> entries;
  for (std::int64_t r = 0; r < call.size(); ++r) {
    entries.push_back(all[r][0].item<std::int64_t>());
    if (all[r][1].item<std::int64_t>() == all[0][1].item<std::int64_t>()) continue;
    call.refuse(ErrorKind::kUsage, "the sparse tensors of rank 0 and rank ", r,
                " differ in type, sizes or number of sparse dimensions; this rank's has sizes ",
                tensor.sizes(), ", ", tensor.sparse_dim(), " of them sparse");
  }
  return entries;
}

std::vector<std::uint64_t> times(const std::vector<std::int64_t>& entries, std::int64_t factor) {
  std::vector<std::uint64_t> counts;
  for (const auto n : entries) counts.push_back(static_cast<std::uint64_t>(n * factor));
  return counts;
}

}  // namespace

Work all_reduce_sparse(at::Tensor tensor, const AllReduceOptions& options) {
  CollectiveCall call(OpType::kAllReduceSparse, options);
  if (!call.takes_part()) return {};
  check_sparse(call, tensor, options.op);
  call.wire_for_reduce(tensor.scalar_type(), options.op);
  const at::NoGradGuard no_grad;
  const auto mine = tensor.detach().coalesce();
  const auto indices = mine.indices().t().contiguous();  // one row per entry
  const auto values = mine.values();
  call.hold_deadline();
  const auto entries = exchange_entries(call, tensor, indices.size(0), options);
  const auto per_entry = c10::multiply_integers(values.sizes().slice(1));
  const auto index_counts = times(entries, tensor.sparse_dim());
  const auto value_counts = times(entries, per_entry * call.wire_for_move(values.scalar_type()).units);
  HeldTensors held{.results = {tensor}};
  std::vector<lockstep_op> ops;
  const auto all_indices = all_gather_parts(call, indices, index_counts, ops, held);
  const auto all_values = all_gather_parts(call, values, value_counts, ops, held);
  auto value_sizes = values.sizes().vec();
  value_sizes[0] = 0;
  for (const auto n : entries) value_sizes[0] += n;
  held.finish = [=] {
    const auto rows = at::cat(all_indices).view({value_sizes[0], tensor.sparse_dim()});
    const auto sum = at::sparse_coo_tensor(rows.t().contiguous(), at::cat(all_values).view(value_sizes),
                                           tensor.sizes(), tensor.options())
                         .coalesce();
    at::Tensor(tensor).copy_(sum);
  };
  return call.start_all(std::move(ops), std::move(held));
}

}  // namespace lockstep::internal
