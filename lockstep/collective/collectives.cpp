// The collectives that reduce, and barrier.
#include "lockstep/collective/collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/collective/detail/all_reduce_into.h"
#include "lockstep/collective/internal/batch.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/internal/packing.h"
#include "lockstep/collective/internal/rank_parts.h"
#include "lockstep/collective/internal/sparse.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep {
namespace {

using internal::CollectiveCall;
using internal::has_streams;
using internal::HeldTensors;
using internal::is_plain;
using internal::plain;
using internal::real_sizes;
using internal::Wire;

// Parts of different sizes: one reduction per rank, under one Work.
Work reduce_scatter_uneven(CollectiveCall& call, const at::Tensor& output,
                           const std::vector<at::Tensor>& inputs, Wire wire, bool use_temporary) {
  // REDUCE_SCATTER has one count for all ranks, hence one operation per part. All ranks post them in the same
  // order (by rank of the part), as collectives of one communicator must be.
  const bool reduces = call.offers(LOCKSTEP_REDUCE);
  const auto own = static_cast<std::size_t>(call.rank());
  HeldTensors held;
  const auto recv = room_for(output, use_temporary, held);
  std::vector<lockstep_op> ops;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    // Without REDUCE everyone gets every part, in a temporary.
    const auto send = reduces || !is_plain(inputs[r]) ? plain(inputs[r]) : inputs[r].clone();
    lockstep_op op = call.op();
    op.kind = reduces ? LOCKSTEP_REDUCE : LOCKSTEP_ALL_REDUCE;
    op.root = static_cast<std::int32_t>(r);
    op.dtype = wire.dtype;
    op.count = static_cast<std::uint64_t>(inputs[r].numel() * (inputs[r].is_complex() ? 2 : 1));
    op.send = send.const_data_ptr();
    op.recv = r == own ? recv.mutable_data_ptr() : (reduces ? nullptr : send.mutable_data_ptr());
    held.buffers.push_back(send);
    ops.push_back(op);
  }
  held.buffers.push_back(recv);
  return call.start_all(std::move(ops), std::move(held));
}

}  // namespace

Work all_reduce(at::Tensor tensor, AllReduceOptions options) {
  CollectiveCall call(OpType::kAllReduce, options);
  // Every collective has the same order: membership, then all checks, then the temporaries, then the start. A
  // refusal changes no tensor, and refuse() counts the call, so that the sequence numbers of the ranks stay
  // comparable.
  if (!call.takes_part(true)) return {};
  if (tensor.defined() && tensor.layout() == at::kSparse) [[unlikely]]
    return internal::all_reduce_sparse(std::move(tensor), options);
  call.check_output(tensor, "tensor");
  const auto wire = call.wire_for_reduce(tensor.scalar_type(), options.op);
  call.describe(tensor);
  // Of PREMUL_SUM the product, and with it the tensor's values, are taken now; for other operations launch()
  // reads the tensor.
  if (auto* batch = call.batch()) [[unlikely]]
    return batch->add(call, LOCKSTEP_ALL_REDUCE, options.op, {tensor, call.scaled(tensor, options.op)});
  call.op().kind = LOCKSTEP_ALL_REDUCE;
  call.set_reduce(options.op);
  if (options.op == ReduceOp::kPremulSum) [[unlikely]] {
    const auto send = call.scaled(tensor, options.op);
    HeldTensors held;
    const auto recv = room_for(tensor, false, held);
    return call.start(send, recv, tensor.numel(), wire, std::move(held));
  }
  return call.start_in_place(std::move(tensor), wire);
}

Work internal::all_reduce_into(at::Tensor output, at::Tensor input, AllReduceOptions options) {
  CollectiveCall call(OpType::kAllReduce, options);
  if (!call.takes_part()) return {};
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  if (real_sizes(output) != real_sizes(input)) {
    call.refuse(ErrorKind::kUsage, "output has sizes ", output.sizes(), ", input ", input.sizes(),
                "; they must be identical");
  }
  // Refused rather than copied: one pass over the inputs is all that this function is for
  // (all_reduce_into.h).
  if (may_share_memory(output, input)) call.refuse(ErrorKind::kUsage, "output and input share memory");
  const auto wire = call.wire_for_reduce(input.scalar_type(), options.op);
  call.describe(input);
  call.op().kind = LOCKSTEP_ALL_REDUCE;
  call.set_reduce(options.op);
  HeldTensors held;
  const auto recv = room_for(output, false, held);
  return call.start(plain(call.scaled(input, options.op)), recv, input.numel(), wire, std::move(held));
}

Work reduce(at::Tensor tensor, ReduceOptions options) {
  CollectiveCall call(OpType::kReduce, options);
  if (!call.takes_part()) return {};
  call.check_output(tensor, "tensor");
  call.describe(tensor);
  const int dst = call.root(options.dst, options.group_dst, "dst");
  const auto wire = call.wire_for_reduce(tensor.scalar_type(), options.op);
  // Without REDUCE the engine reduces for all. Ranks other than dst then receive into a temporary, since
  // reduce must leave their tensor unchanged.
  const bool direct = call.offers(LOCKSTEP_REDUCE), wanted = call.rank() == dst;
  call.op().kind = direct ? LOCKSTEP_REDUCE : LOCKSTEP_ALL_REDUCE;
  call.op().root = dst;
  call.set_reduce(options.op);
  const auto send = plain(call.scaled(tensor, options.op));
  HeldTensors held{.results = {tensor}};
  at::Tensor recv;
  if (wanted) {
    recv = room_for(tensor, false, held);
  } else if (!direct) {
    recv = internal::plain_like(tensor);
  }
  return call.start(send, recv, tensor.numel(), wire, std::move(held));
}

Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceScatterOptions options) {
  CollectiveCall call(OpType::kReduceScatter, options);
  if (!call.takes_part()) return {};
  call.check_output(output, "output");
  call.check_list(inputs, "inputs", output, false);
  const auto& own = inputs[static_cast<std::size_t>(call.rank())];
  if (real_sizes(own) != real_sizes(output)) {
    call.refuse(ErrorKind::kUsage, "output has sizes ", output.sizes(), ", inputs[", call.rank(), "] ",
                own.sizes(), "; they must be identical");
  }
  // With shared memory the engine would write the result over inputs that it, or another rank, has not read
  // yet: then a temporary receives it.
  const bool shares = std::ranges::any_of(
      inputs, [&](const auto& input) { return internal::may_share_memory(output, input); });
  call.wire_for_reduce(own.scalar_type(), options.op);  // either may be the complex one
  const auto wire = call.wire_for_reduce(output.scalar_type(), options.op);
  call.set_reduce(options.op);
  // Sizes may differ between the parts, but part r has one size on all ranks: every rank takes the same
  // branch below.
  call.describe(inputs, !internal::have_one_size(inputs));
  for (auto& input : inputs) input = call.scaled(input, options.op);
  if (!internal::have_one_size(inputs)) return reduce_scatter_uneven(call, output, inputs, wire, shares);
  call.op().kind = LOCKSTEP_REDUCE_SCATTER;
  HeldTensors held;
  const auto recv = room_for(output, shares, held);
  return call.start(internal::packed(inputs), recv, output.numel(), wire, std::move(held));
}

Work reduce_scatter_single(at::Tensor output, at::Tensor input, ReduceScatterOptions options) {
  CollectiveCall call(OpType::kReduceScatterTensor, options);
  if (!call.takes_part(true)) return {};
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  internal::check_whole(call, input, "input", output, "the output");
  const bool shares = internal::may_share_memory(output, input);
  call.wire_for_reduce(input.scalar_type(), options.op);  // either may be the complex one
  const auto wire = call.wire_for_reduce(output.scalar_type(), options.op);
  call.describe(input);
  input = call.scaled(input, options.op);
  if (auto* batch = call.batch())
    return batch->add(call, LOCKSTEP_REDUCE_SCATTER, options.op, {output, input});
  call.op().kind = LOCKSTEP_REDUCE_SCATTER;
  call.set_reduce(options.op);
  HeldTensors held;
  const auto recv = room_for(output, shares, held);
  return call.start(plain(input), recv, output.numel(), wire, std::move(held));
}

Work barrier(BarrierOptions options) {
  CollectiveCall call(OpType::kBarrier, options);
  if (!call.takes_part()) return {};
  return call.start_barrier();
}

at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype, EmptySharedOptions options) try {
  const auto group = internal::resolve(options.group);
  std::int64_t n_bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto size : sizes) {
    // The product decides how much shared memory is allocated, before ATen sees the sizes. The text completes
    // the message below.
    if (size < 0 || __builtin_mul_overflow(n_bytes, size, &n_bytes))
      base::raise(ErrorKind::kUsage, "no tensor has them");
  }
  auto device = options.device;
  if (has_streams(device.type()) && !device.has_index()) device = internal::current_device(device.type());
  const auto tensor_options = at::TensorOptions().dtype(dtype).device(device);
  auto memory = n_bytes == 0 ? nullptr : group->allocate(static_cast<std::size_t>(n_bytes), device);
  if (!memory) return at::empty(sizes, tensor_options);
  // The tensor's deleter owns the memory, so the memory outlives the group's handle when the tensor does.
  void* data = memory.get();
  // The device is named, so that libtorch does not ask a driver whose memory it is.
  return at::for_blob(data, sizes)
      .deleter([memory = std::move(memory)](void*) mutable { memory.reset(); })
      .options(tensor_options)
      .target_device(device)
      .make_tensor();
} catch (const Error& error) {
  Failure failure = error.failure();
  failure.message = base::cat("empty_shared of sizes ", sizes, " (called at ", options.where.file_name(), ":",
                              options.where.line(), "): ", failure.message);
  base::raise(std::move(failure));
}

}  // namespace lockstep
