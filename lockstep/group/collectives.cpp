#include "lockstep/group/collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>

#include "lockstep/group/internal/call.h"

namespace lockstep {
namespace {

using internal::Call;
using internal::Held;
using internal::is_plain;
using internal::plain;
using internal::plain_like;
using internal::real_sizes;

// `whole` must hold one `part` per rank: concatenated on dimension 0, stacked, or flat.
void check_whole(const Call& call, const at::Tensor& whole, const char* whole_role, const at::Tensor& part,
                 const char* part_role) {
  const auto whole_sizes = real_sizes(whole), part_sizes = real_sizes(part);
  auto stacked = part_sizes;
  stacked.insert(stacked.begin(), call.size());
  auto concatenated = part_sizes;
  if (concatenated.empty()) {
    concatenated.push_back(call.size());
  } else {
    concatenated[0] *= call.size();
  }
  std::int64_t n_elements = call.size();
  for (const auto size : part_sizes) n_elements *= size;
  const std::vector<std::int64_t> flat{n_elements};
  if (whole_sizes == stacked || whole_sizes == concatenated || whole_sizes == flat) return;
  call.refuse(ErrorKind::kUsage, whole_role, " has sizes ", whole.sizes(), ", ", part_role, " ", part.sizes(),
              "; ", whole_role, " must be ", call.size(), " of them, concatenated on dimension 0 or stacked");
}

// One tensor per rank, each like `part`.
void check_list(const Call& call, const std::vector<at::Tensor>& list, const char* role,
                const at::Tensor& part, const char* part_role) {
  if (list.size() != static_cast<std::size_t>(call.size())) {
    call.refuse(ErrorKind::kUsage, role, " has ", list.size(), " tensors, the group ", call.size(),
                " ranks; one each is needed");
  }
  const auto sizes = real_sizes(part);
  for (std::size_t i = 0; i < list.size(); ++i) {
    call.check(list[i], role);
    call.check_same_type(list[i], role, part);
    if (list[i].scalar_type() != list[0].scalar_type()) call.refuse(ErrorKind::kUsage, role, " mixes types");
    if (real_sizes(list[i]) != sizes) {
      call.refuse(ErrorKind::kUsage, role, "[", i, "] has sizes ", list[i].sizes(), ", ", part_role, " ",
                  part.sizes(), "; uneven sizes are not supported");
    }
  }
}

// The tensors are one piece of memory, in order: the engine can use it as it lies.
bool is_one_piece(const std::vector<at::Tensor>& list) {
  const auto& first = list.front();
  const auto n_bytes = static_cast<std::ptrdiff_t>(first.nbytes());
  const auto* start = static_cast<const char*>(first.const_data_ptr());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto offset = static_cast<std::ptrdiff_t>(i) * n_bytes;
    if (!is_plain(list[i]) || !list[i].is_alias_of(first) || list[i].const_data_ptr() != start + offset)
      return false;
  }
  return true;
}

// `part` is this rank's own place in `whole`.
bool is_own_slot(const Call& call, const at::Tensor& whole, const at::Tensor& part) {
  if (!is_plain(whole) || !is_plain(part) || part.numel() == 0) return false;
  const auto offset = static_cast<std::ptrdiff_t>(part.nbytes()) * call.rank();
  return part.const_data_ptr() == static_cast<const char*>(whole.const_data_ptr()) + offset;
}

// Room for one `part` per rank.
at::Tensor room_for_all(const Call& call, const at::Tensor& part) {
  auto sizes = part.sizes().vec();
  sizes.insert(sizes.begin(), call.size());
  return at::empty(sizes, at::TensorOptions().dtype(part.scalar_type()));
}

lockstep_reduce_op to_engine(ReduceOp op) {
  return static_cast<lockstep_reduce_op>(op);
}

// Where an operation writes: the tensor itself when plain, else a temporary that `held` copies back.
at::Tensor output_buffer(const at::Tensor& output, bool use_temporary, Held& held) {
  held.results = {output};
  if (is_plain(output) && !use_temporary) return output;
  auto temporary = plain_like(output);
  held.copies.emplace_back(output, temporary);
  return temporary;
}

}  // namespace

Work all_reduce(at::Tensor tensor, AllReduceOptions options) {
  Call call("all_reduce", options);
  call.check_output(tensor, "tensor");
  const auto wire = call.wire_for_reduce(tensor.scalar_type(), options.op);
  call.op().kind = LOCKSTEP_ALL_REDUCE;
  call.op().reduce = to_engine(options.op);
  return call.start_in_place(std::move(tensor), wire);
}

Work broadcast(at::Tensor tensor, BroadcastOptions options) {
  Call call("broadcast", options);
  call.check_output(tensor, "tensor");
  call.check_root(options.src, "src");
  const auto wire = call.wire_for_move(tensor.scalar_type());
  call.op().kind = LOCKSTEP_BROADCAST;
  call.op().root = options.src;
  return call.start_in_place(std::move(tensor), wire);
}

Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options) {
  Call call("all_gather", options);
  call.check(input, "input");
  check_list(call, outputs, "outputs", input, "the input");
  bool too_hard = false;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    call.check_output(outputs[i], "outputs");
    too_hard = call.check_apart(outputs[i], "an output", input, "the input") || too_hard;
    for (std::size_t j = 0; j < i; ++j)
      call.check_apart(outputs[i], "an output", outputs[j], "another output");
  }
  const auto wire = call.wire_for_move(input.scalar_type());
  call.op().kind = LOCKSTEP_ALL_GATHER;
  const auto send = plain(input);
  const bool direct = is_one_piece(outputs) && !too_hard;
  const auto recv = direct ? outputs.front() : room_for_all(call, outputs.front());
  Held held{.buffers = {}, .results = outputs, .copies = {}};
  for (std::size_t i = 0; !direct && i < outputs.size(); ++i) {
    held.copies.emplace_back(outputs[i], recv.select(0, static_cast<std::int64_t>(i)));
  }
  return call.start(send, recv, input.numel(), wire, std::move(held));
}

Work all_gather_into_tensor(at::Tensor output, at::Tensor input, AllGatherOptions options) {
  Call call("all_gather_into_tensor", options);
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  check_whole(call, output, "output", input, "the input");
  // In place, as NCCL's users write it: the input is this rank's own slot.
  const bool own_slot = is_own_slot(call, output, input);
  const bool too_hard = !own_slot && call.check_apart(output, "output", input, "input");
  const auto wire = call.wire_for_move(input.scalar_type());
  call.op().kind = LOCKSTEP_ALL_GATHER;
  Held held;
  const auto recv = output_buffer(output, too_hard, held);
  const auto send = own_slot ? input.clone() : plain(input);
  return call.start(send, recv, input.numel(), wire, std::move(held));
}

Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceScatterOptions options) {
  Call call("reduce_scatter", options);
  call.check_output(output, "output");
  check_list(call, inputs, "inputs", output, "the output");
  bool too_hard = false;
  for (const auto& input : inputs)
    too_hard = call.check_apart(output, "output", input, "an input") || too_hard;
  call.wire_for_reduce(inputs.front().scalar_type(), options.op);  // either may be the complex one
  const auto wire = call.wire_for_reduce(output.scalar_type(), options.op);
  call.op().kind = LOCKSTEP_REDUCE_SCATTER;
  call.op().reduce = to_engine(options.op);
  auto send = inputs.front();
  if (!is_one_piece(inputs)) {
    const at::NoGradGuard no_grad;
    send = room_for_all(call, inputs.front());
    for (std::size_t i = 0; i < inputs.size(); ++i)
      send.select(0, static_cast<std::int64_t>(i)).copy_(inputs[i]);
  }
  Held held;
  const auto recv = output_buffer(output, too_hard, held);
  return call.start(send, recv, output.numel(), wire, std::move(held));
}

Work reduce_scatter_tensor(at::Tensor output, at::Tensor input, ReduceScatterOptions options) {
  Call call("reduce_scatter_tensor", options);
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  check_whole(call, input, "input", output, "the output");
  const bool own_slot = is_own_slot(call, input, output);
  const bool too_hard = !own_slot && call.check_apart(output, "output", input, "input");
  call.wire_for_reduce(input.scalar_type(), options.op);  // either may be the complex one
  const auto wire = call.wire_for_reduce(output.scalar_type(), options.op);
  call.op().kind = LOCKSTEP_REDUCE_SCATTER;
  call.op().reduce = to_engine(options.op);
  Held held;
  const auto recv = output_buffer(output, own_slot || too_hard, held);
  return call.start(plain(input), recv, output.numel(), wire, std::move(held));
}

Work barrier(BarrierOptions options) {
  return Call("barrier", options).start_barrier();
}

at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype, EmptySharedOptions options) try {
  const auto group = internal::resolve(options.group);
  std::int64_t n_bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto size : sizes) {
    if (size < 0 || __builtin_mul_overflow(n_bytes, size, &n_bytes))
      raise(ErrorKind::kUsage, "no tensor has them");
  }
  const auto tensor_options = at::TensorOptions().dtype(dtype);
  auto memory = n_bytes == 0 ? nullptr : group->allocate(static_cast<std::size_t>(n_bytes));
  if (!memory) return at::empty(sizes, tensor_options);
  void* data = memory.get();
  return at::from_blob(
      data, sizes, [memory = std::move(memory)](void*) mutable { memory.reset(); }, tensor_options);
} catch (const Error& error) {
  Failure failure = error.failure();
  failure.message = cat("empty_shared of sizes ", sizes, " (called at ", options.where.file_name(), ":",
                        options.where.line(), "): ", failure.message);
  raise(std::move(failure));
}

}  // namespace lockstep
