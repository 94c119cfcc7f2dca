// The collectives that only move data.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "lockstep/collective/collectives.h"
#include "lockstep/collective/internal/batch.h"
#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/internal/packing.h"
#include "lockstep/collective/internal/rank_parts.h"

namespace lockstep {
namespace internal {

void check_whole(const CollectiveCall& call, const at::Tensor& whole, const char* whole_role,
                 const at::Tensor& part, const char* part_role) {
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
  // All three have the same elements in the same order in memory: the engine sees one count and no shape.
  if (whole_sizes == stacked || whole_sizes == concatenated || whole_sizes == flat) return;
  call.refuse(ErrorKind::kUsage, whole_role, " has sizes ", whole.sizes(), ", ", part_role, " ", part.sizes(),
              "; ", whole_role, " must be ", call.size(), " of them, concatenated on dimension 0 or stacked");
}

}  // namespace internal

namespace {

using internal::CollectiveCall;
using internal::flat_as;
using internal::HeldTensors;
using internal::plain;
using internal::plain_copy;

// Every tensor of the list has the sizes of `part`.
void check_same_sizes(const CollectiveCall& call, const std::vector<at::Tensor>& list, const char* role,
                      const at::Tensor& part, const char* part_role) {
  const auto sizes = internal::real_sizes(part);
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (internal::real_sizes(list[i]) == sizes) continue;
    call.refuse(ErrorKind::kUsage, role, "[", i, "] has sizes ", list[i].sizes(), ", ", part_role, " ",
                part.sizes(), "; they must be identical");
  }
}

// A list that only the root gives.
void check_root_list(CollectiveCall& call, const std::vector<at::Tensor>& list, const char* role,
                     const at::Tensor& tensor, int root) {
  if (call.rank() != root) {
    if (list.empty()) return;
    call.refuse(ErrorKind::kUsage, role, " is given on rank ", call.rank(), " of the group; only rank ", root,
                ", the root, has one");
  }
  if (list.empty()) call.refuse(ErrorKind::kUsage, role, " is empty; the root needs one tensor per rank");
  call.check_list(list, role, tensor, std::string_view(role) == "gather_list");
  check_same_sizes(call, list, role, tensor, "tensor");
}

bool may_share_memory(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  return std::ranges::any_of(outputs, [&](const auto& output) {
    return std::ranges::any_of(inputs,
                               [&](const auto& input) { return internal::may_share_memory(output, input); });
  });
}

// The rows in which the engine can write the parts where they belong; 0 when it needs room of its own.
std::uint64_t rows_to_write(const CollectiveCall& call, const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs) {
  return call.takes_rows() && !may_share_memory(outputs, inputs) ? internal::rows_of(outputs) : 0;
}

// Where the parts of all ranks are received: as room_for, and in the outputs themselves where they are a
// tensor cut along an inner dimension.
at::Tensor room_for_parts(CollectiveCall& call, const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& inputs, HeldTensors& held) {
  const auto rows = rows_to_write(call, outputs, inputs);
  if (rows <= 1)
    return room_for(outputs, call.op().kind == LOCKSTEP_ALL_TO_ALL_V && may_share_memory(outputs, inputs),
                    held);
  // outputs[0] begins where the whole tensor does, and the engine finds the other parts by the lengths of the
  // rows; all are views of one storage.
  call.op().recv_rows = rows;
  held.results = outputs;
  return outputs[0];
}

// A tensor some of whose elements share memory (expand()) gets what came where that fits: one value for all
// that share.
Work broadcast_expanded(CollectiveCall& call, const at::Tensor& tensor, internal::Wire wire) {
  // The copy goes to one element of each set that shares memory; `shared` then compares the whole, and raises
  // where the source's elements were not equal, instead of keeping the last one written.
  const auto temporary = plain(tensor);
  auto to = tensor, from = temporary;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) != 0 || tensor.size(d) < 2) continue;
    to = to.narrow(d, 0, 1);
    from = from.narrow(d, 0, 1);
  }
  HeldTensors held{.results = {tensor}, .copies = {{to, from}}, .shared = {{tensor, temporary}}};
  return call.start(temporary, temporary, tensor.numel(), wire, std::move(held));
}

// Room for the parts of all ranks, flat.
at::Tensor room_for_all(const CollectiveCall& call, const at::Tensor& part) {
  return at::empty({call.size() * part.numel()},
                   at::TensorOptions().dtype(part.scalar_type()).device(part.device()));
}

// Elements per rank from rows per rank; equal parts without splits. Raises kUsage when they do not fit.
std::vector<std::uint64_t> split_counts(const CollectiveCall& call, const std::vector<std::int64_t>& splits,
                                        const at::Tensor& tensor, const char* role, std::int64_t units) {
  const auto n = static_cast<std::size_t>(call.size());
  const auto rows = tensor.size(0);
  const auto row = static_cast<std::uint64_t>(c10::multiply_integers(tensor.sizes().slice(1)) * units);
  if (splits.empty()) {
    if (rows % call.size() != 0) {
      call.refuse(ErrorKind::kUsage, role, " has ", rows, " rows, which do not divide by the ", n,
                  " ranks; give ", role, "_split_sizes");
    }
    return std::vector<std::uint64_t>(n, static_cast<std::uint64_t>(rows / call.size()) * row);
  }
  if (splits.size() != n) {
    call.refuse(ErrorKind::kUsage, role, "_split_sizes has ", splits.size(), " entries, the group ", n,
                " ranks; one each is needed");
  }
  std::vector<std::uint64_t> counts;
  std::int64_t sum = 0;
  for (const auto split : splits) {
    if (split < 0)
      call.refuse(ErrorKind::kUsage, role, "_split_sizes holds ", split, "; rows are not negative");
    // Left early, counts is too short, which the check below refuses.
    if (__builtin_add_overflow(sum, split, &sum)) break;
    counts.push_back(static_cast<std::uint64_t>(split) * row);
  }
  if (sum != rows || counts.size() != n) {
    call.refuse(ErrorKind::kUsage, role, "_split_sizes add up to ", sum, ", ", role, " has ", rows, " rows");
  }
  return counts;
}

// What a rank keeps must fit both sides; the engine compares what the others exchange.
void check_own_count(const CollectiveCall& call, std::uint64_t out, std::uint64_t in) {
  if (out == in) return;
  call.refuse(ErrorKind::kUsage, "this rank's part for itself has ", in, " elements in the input and ", out,
              " in the output");
}

// Equal parts without ALL_TO_ALL: everyone gets everything.
Work all_to_all_by_gathering(CollectiveCall& call, const at::Tensor& send, const at::Tensor& output,
                             internal::Wire wire) {
  call.op().kind = LOCKSTEP_ALL_GATHER;
  const auto everything = room_for_all(call, send);
  HeldTensors held{.results = {output}};
  const auto part = send.numel() / call.size();
  const auto mine = everything.view({call.size(), call.size(), part}).select(1, call.rank());
  // finish, not `copies`: `mine` has gaps, so flat_as() copies it and must run after the operation.
  held.finish = [output, mine] { output.copy_(flat_as(mine, output.scalar_type()).view(output.sizes())); };
  return call.start(send, everything, send.numel(), wire, std::move(held));
}

}  // namespace

Work broadcast(at::Tensor tensor, BroadcastOptions options) {
  CollectiveCall call(OpType::kBroadcast, options);
  if (!call.takes_part()) return {};
  call.check(tensor, "tensor");
  call.describe(tensor);
  call.op().root = call.root(options.src, options.group_src, "src");
  const auto wire = call.wire_for_move(tensor.scalar_type());
  call.op().kind = LOCKSTEP_BROADCAST;
  // check(), not check_output(): an expanded tensor may be the source, and at a receiver equal values fit
  // into it.
  if (internal::overlaps_itself(tensor)) [[unlikely]]
    return broadcast_expanded(call, tensor, wire);
  return call.start_in_place(std::move(tensor), wire);
}

Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options) {
  CollectiveCall call(OpType::kAllGather, options);
  if (!call.takes_part()) return {};
  call.check(input, "input");
  call.check_list(outputs, "outputs", input, true);
  const auto own = static_cast<std::size_t>(call.rank());
  if (internal::real_sizes(outputs[own]) != internal::real_sizes(input)) {
    call.refuse(ErrorKind::kUsage, "outputs[", own, "] has sizes ", outputs[own].sizes(), ", the input ",
                input.sizes(), "; they must be identical");
  }
  call.describe(input, !internal::have_one_size(outputs));
  if (!internal::have_one_size(outputs)) {
    // `counts` is on this frame while op() points into it: post() copies the counts, and run() returns after
    // the operation.
    const auto counts = internal::counts_of(outputs, call.wire_for_move(outputs[0].scalar_type()));
    HeldTensors held{.results = outputs};
    std::vector<lockstep_op> ops;
    const auto send = internal::flat_as(input, outputs[0].scalar_type());
    if (const auto rows = rows_to_write(call, outputs, {input}); rows > 1) {
      call.op().kind = LOCKSTEP_ALL_GATHER_V;
      call.op().recv_counts = counts.data();
      call.op().recv_rows = rows;
      return call.start(send, outputs[0], 0, call.wire_for_move(outputs[0].scalar_type()), std::move(held));
    }
    const auto parts = internal::all_gather_parts(call, send, counts, ops, held);
    for (std::size_t r = 0; r < parts.size(); ++r)
      held.copies.emplace_back(outputs[r], parts[r].view(outputs[r].sizes()));
    return call.start_all(std::move(ops), std::move(held));
  }
  const auto wire = call.wire_for_move(input.scalar_type());
  call.op().kind = LOCKSTEP_ALL_GATHER;
  HeldTensors held;
  // After op().kind: room_for_parts() looks at it. It may set recv_rows, which start() sends along.
  const auto recv = room_for_parts(call, outputs, {input}, held);
  // The input may be one of the outputs. It is copied rather than the outputs, since it is the smaller
  // buffer.
  const auto send = may_share_memory(outputs, {input}) ? plain_copy(input) : plain(input);
  return call.start(send, recv, input.numel(), wire, std::move(held));
}

Work all_gather_single(at::Tensor output, at::Tensor input, AllGatherOptions options) {
  CollectiveCall call(OpType::kAllGatherIntoTensor, options);
  if (!call.takes_part(true)) return {};
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  internal::check_whole(call, output, "output", input, "the input");
  call.describe(input);
  if (auto* batch = call.batch()) return batch->add(call, LOCKSTEP_ALL_GATHER, {}, {output, input});
  const auto wire = call.wire_for_move(input.scalar_type());
  call.op().kind = LOCKSTEP_ALL_GATHER;
  HeldTensors held;
  const auto recv = room_for(output, false, held);
  const auto send = internal::may_share_memory(output, input) ? plain_copy(input) : plain(input);
  return call.start(send, recv, input.numel(), wire, std::move(held));
}

Work gather(at::Tensor tensor, std::vector<at::Tensor> gather_list, GatherOptions options) {
  CollectiveCall call(OpType::kGather, options);
  if (!call.takes_part()) return {};
  call.check(tensor, "tensor");
  call.describe(tensor);
  const int dst = call.root(options.dst, options.group_dst, "dst", 0);
  check_root_list(call, gather_list, "gather_list", tensor, dst);
  const auto wire = call.wire_for_move(tensor.scalar_type());
  const bool direct = call.offers(LOCKSTEP_GATHER);
  call.op().kind = direct ? LOCKSTEP_GATHER : LOCKSTEP_ALL_GATHER;
  call.op().root = dst;
  HeldTensors held;
  at::Tensor recv;
  if (call.rank() == dst) {
    recv = room_for(gather_list, false, held);
  } else if (!direct) {
    recv = room_for_all(call, tensor);
  }
  const auto send = may_share_memory(gather_list, {tensor}) ? plain_copy(tensor) : plain(tensor);
  return call.start(send, recv, tensor.numel(), wire, std::move(held));
}

Work gather_single(at::Tensor tensor, at::Tensor gather_tensor, GatherOptions options) {
  CollectiveCall call(OpType::kGather, options);
  if (!call.takes_part()) return {};
  call.check(tensor, "tensor");
  call.describe(tensor);
  const int dst = call.root(options.dst, options.group_dst, "dst", 0);
  if (call.rank() != dst && gather_tensor.defined())
    call.refuse(ErrorKind::kUsage, "gather_tensor is for rank ", dst,
                " of the group only; leave it undefined on rank ", call.rank());
  if (call.rank() == dst) {
    call.check_output(gather_tensor, "gather_tensor");
    call.check_same_type(gather_tensor, "gather_tensor", tensor);
    internal::check_whole(call, gather_tensor, "gather_tensor", tensor, "the tensor");
  }
  const auto wire = call.wire_for_move(tensor.scalar_type());
  const bool direct = call.offers(LOCKSTEP_GATHER);
  call.op().kind = direct ? LOCKSTEP_GATHER : LOCKSTEP_ALL_GATHER;
  call.op().root = dst;
  HeldTensors held;
  at::Tensor recv;
  if (call.rank() == dst) {
    recv = room_for(gather_tensor, false, held);
  } else if (!direct) {
    recv = room_for_all(call, tensor);
  }
  const bool shares = call.rank() == dst && internal::may_share_memory(gather_tensor, tensor);
  return call.start(shares ? plain_copy(tensor) : plain(tensor), recv, tensor.numel(), wire, std::move(held));
}

Work scatter(at::Tensor tensor, std::vector<at::Tensor> scatter_list, ScatterOptions options) {
  CollectiveCall call(OpType::kScatter, options);
  if (!call.takes_part()) return {};
  call.check_output(tensor, "tensor");
  call.describe(tensor);
  const int src = call.root(options.src, options.group_src, "src", 0);
  check_root_list(call, scatter_list, "scatter_list", tensor, src);
  const auto wire = call.wire_for_move(tensor.scalar_type());
  call.op().root = src;
  HeldTensors held;
  if (call.offers(LOCKSTEP_SCATTER)) {
    call.op().kind = LOCKSTEP_SCATTER;
    const auto recv = room_for(tensor, may_share_memory({tensor}, scatter_list), held);
    const auto send = call.rank() == src ? internal::packed(scatter_list) : at::Tensor();
    return call.start(send, recv, tensor.numel(), wire, std::move(held));
  }
  // Everyone gets everything and takes its part.
  call.op().kind = LOCKSTEP_BROADCAST;
  const auto everything = room_for_all(call, tensor).view({call.size(), tensor.numel()});
  // On ranks other than src the list is empty and the buffer stays uninitialised until the broadcast fills
  // it.
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < scatter_list.size(); ++i)
    everything[static_cast<std::int64_t>(i)].copy_(flat_as(scatter_list[i], tensor.scalar_type()));
  held.copies.emplace_back(tensor, everything[call.rank()].view(tensor.sizes()));
  held.results = {tensor};
  return call.start(everything, everything, everything.numel(), wire, std::move(held));
}

Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, AllToAllOptions options) {
  CollectiveCall call(OpType::kAllToAll, options);
  if (!call.takes_part()) return {};
  if (inputs.empty()) call.refuse(ErrorKind::kUsage, "inputs is empty; one tensor per rank is needed");
  call.check(inputs[0], "inputs");
  call.check_list(inputs, "inputs", inputs[0], false);
  call.check_list(outputs, "outputs", inputs[0], true);
  call.describe(inputs, true);
  const auto wire = call.wire_for_move(inputs[0].scalar_type());
  const auto send_counts = internal::counts_of(inputs, wire);
  const auto recv_counts = internal::counts_of(outputs, call.wire_for_move(outputs[0].scalar_type()));
  const auto own = static_cast<std::size_t>(call.rank());
  check_own_count(call, recv_counts[own], send_counts[own]);
  call.op().kind = LOCKSTEP_ALL_TO_ALL_V;
  call.op().send_counts = send_counts.data();
  call.op().recv_counts = recv_counts.data();
  HeldTensors held;
  const auto recv = room_for_parts(call, outputs, inputs, held);
  // In place, where the engine takes rows: a piece of a tensor cut along an inner dimension is not packed.
  const auto rows = call.takes_rows() ? internal::rows_of(inputs) : 0;
  call.op().send_rows = rows;
  return call.start(rows > 1 ? inputs[0] : internal::packed(inputs), recv, 0, wire, std::move(held));
}

Work all_to_all_single(at::Tensor output, at::Tensor input, AllToAllSingleOptions options) {
  CollectiveCall call(OpType::kAllToAllSingle, options);
  if (!call.takes_part()) return {};
  call.check(input, "input");
  call.check_output(output, "output");
  call.check_same_type(output, "output", input);
  if (input.dim() == 0 || output.dim() == 0)
    call.refuse(ErrorKind::kUsage, "a tensor without dimensions has no rows to split; unsqueeze(0) it");
  call.describe(input, true);
  const auto wire = call.wire_for_move(input.scalar_type());
  const auto out_units = call.wire_for_move(output.scalar_type()).units;
  const auto send_counts = split_counts(call, options.input_split_sizes, input, "input", wire.units);
  const auto recv_counts = split_counts(call, options.output_split_sizes, output, "output", out_units);
  const auto own = static_cast<std::size_t>(call.rank());
  check_own_count(call, recv_counts[own], send_counts[own]);
  const auto send = plain(input);
  const bool equal = options.input_split_sizes.empty() && options.output_split_sizes.empty();
  if (equal && !call.offers(LOCKSTEP_ALL_TO_ALL)) return all_to_all_by_gathering(call, send, output, wire);
  call.op().kind = equal ? LOCKSTEP_ALL_TO_ALL : LOCKSTEP_ALL_TO_ALL_V;
  if (!equal) {
    call.op().send_counts = send_counts.data();
    call.op().recv_counts = recv_counts.data();
  }
  HeldTensors held;
  const auto recv = room_for(output, internal::may_share_memory(output, input), held);
  return call.start(send, recv, equal ? input.numel() / call.size() : 0, wire, std::move(held));
}

}  // namespace lockstep
