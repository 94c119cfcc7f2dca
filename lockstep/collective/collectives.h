// The collectives. Every member of a group calls the same ones in the same order with the same sizes; a mismatch
// between ranks is an error on all of them, not an overrun. All return a Work, which is over when async_op is false.
//
// Tensors: on the CPU, any strides, any number of elements (also none), one type for all tensors of a call (a complex
// type may stand for pairs of its real one). Reductions take the integer, bool, floating and complex types; what only
// moves data takes every type. Results land in the caller's tensors, unseen by autograd. Tensors must not be changed
// before the Work is over. Tensors that share memory, and calls that one rank refuses: see the end of this file.
//
// Roots: src and dst are ranks in the world, group_src and group_dst ranks in the group; give one of the two.
//
// Errors: kUsage for bad arguments (before anything is sent, the group goes on), kUnsupported for what the engine cannot
// do, kPeerLost naming the rank when one dies, kTimeout, kAborted. After any of the last three the group is broken and
// every later operation raises the same error. A group of one does every operation with itself.
// A process that is not a member of the group: nothing happens but a warning; the Work is empty.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <source_location>
#include <utility>
#include <vector>

#include "lockstep/collective/reduce_op.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep {

// The tail every options struct has. Write options in braces at the call, so that `where` is the caller's line.
//   group     null: the default group
//   async_op  true: return at once
//   timeout   unset: the group's
struct AllReduceOptions {
  ReduceOp op{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// In place; the same bits on every rank. Memory from empty_shared is reduced where it lies. Sparse COO tensors: SUM only,
// the result is coalesced; its number of entries is exchanged before the call returns, also when async_op is true.
Work all_reduce(at::Tensor tensor, AllReduceOptions options = {});

struct BroadcastOptions {
  std::optional<int> src{};  // one of the two is required
  std::optional<int> group_src{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// `src`'s values replace everyone's.
Work broadcast(at::Tensor tensor, BroadcastOptions options = {});

struct ReduceOptions {
  std::optional<int> dst{};  // one of the two is required
  std::optional<int> group_dst{};
  ReduceOp op{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// As all_reduce, the result on `dst` only; the others' tensors keep their values.
Work reduce(at::Tensor tensor, ReduceOptions options = {});

struct AllGatherOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// outputs[r] becomes rank r's input. One output per rank, of the size of that rank's input: sizes may differ.
Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options = {});
// output is the concatenation on dimension 0, or the stack, of all inputs, which have one size.
Work all_gather_single(at::Tensor output, at::Tensor input, AllGatherOptions options = {});
// torch's older name for it, also in messages.
inline Work all_gather_into_tensor(at::Tensor output, at::Tensor input, AllGatherOptions options = {}) {
  return all_gather_single(std::move(output), std::move(input), std::move(options));
}

struct GatherOptions {
  std::optional<int> dst{};  // neither: rank 0 of the world
  std::optional<int> group_dst{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// gather_list[r] on `dst` becomes rank r's tensor; all have one size. The list is for `dst` only, empty elsewhere.
Work gather(at::Tensor tensor, std::vector<at::Tensor> gather_list = {}, GatherOptions options = {});
// gather_tensor on `dst` becomes the concatenation on dimension 0, or the stack, of all tensors. It is for `dst` only, undefined
// elsewhere.
Work gather_single(at::Tensor tensor, at::Tensor gather_tensor = {}, GatherOptions options = {});

struct ScatterOptions {
  std::optional<int> src{};  // neither: rank 0 of the world
  std::optional<int> group_src{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// tensor on rank r becomes scatter_list[r] of `src`; all have one size. The list is for `src` only, empty elsewhere.
Work scatter(at::Tensor tensor, std::vector<at::Tensor> scatter_list = {}, ScatterOptions options = {});

struct ReduceScatterOptions {
  ReduceOp op{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// output on rank r becomes the reduction of every rank's inputs[r]. Parts may differ in size, alike on every rank.
Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceScatterOptions options = {});
// input is the concatenation on dimension 0, or the stack, of one part per rank, which have one size.
Work reduce_scatter_single(at::Tensor output, at::Tensor input, ReduceScatterOptions options = {});
// torch's older name for it, also in messages.
inline Work reduce_scatter_tensor(at::Tensor output, at::Tensor input, ReduceScatterOptions options = {}) {
  return reduce_scatter_single(std::move(output), std::move(input), std::move(options));
}

struct AllToAllOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// outputs[i] on rank r becomes inputs[r] of rank i. Sizes may differ, both sides of a pair must agree.
Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                AllToAllOptions options = {});

struct AllToAllSingleOptions {
  // Rows (dimension 0) for and from each rank; empty: equal parts, and the rows must divide by the group's size.
  std::vector<std::int64_t> output_split_sizes{};
  std::vector<std::int64_t> input_split_sizes{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// The input's parts go to the ranks in order; the output is the concatenation of what came, in rank order. Every rank
// gives splits, or none does.
Work all_to_all_single(at::Tensor output, at::Tensor input, AllToAllSingleOptions options = {});

struct BarrierOptions {
  std::vector<std::int64_t> device_ids{};  // means something on GPUs only
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Over when every rank has entered it, and every earlier collective of the group is over.
Work barrier(BarrierOptions options = {});

struct EmptySharedOptions {
  Group group{};
  std::source_location where = std::source_location::current();
};
// An uninitialised tensor in memory that all ranks of the group's host can reach, so that collectives reduce it
// where it lies. A local call, not a collective. Plain memory in a world of one. The tensor keeps the group's memory
// alive, also after destroy_process_group. Raises kResource when the memory is not to be had.
at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                        EmptySharedOptions options = {});

}  // namespace lockstep

// Tensors that share memory
//  - What is read may share memory with what is written, in any way: everything is read first. all_gather(outs,
//    outs[rank]), a root's tensor that is its own list entry, all_to_all_single(t, t) and the like work in place; the
//    smaller side is copied.
//  - Two outputs that share memory are refused (kUsage): two ranks' data cannot both be kept.
//  - broadcast into a tensor whose elements share memory (expand()) works where the values that come agree, and so does
//    all_reduce_coalesced of tensors that share memory. Where they do not, the rank whose memory cannot hold them raises
//    kUsage after the operation; the others are served and the group goes on. Other collectives refuse to write to
//    such a tensor.
//  - A CoalescingScope refuses a tensor that shares memory with one collected before: its calls have no order.
//
// Calls that one rank refuses
// A bad argument is refused before anything is sent. When all ranks refuse the call the group goes on. When only some do
// (a root's list, an undefined tensor), the others are inside an operation that will not come to pass. Every collective
// has a number that counts refused ones too, and engines that compare calls (host, Gloo) compare it: the next
// collective of the rank that refused raises kUsage on every rank, naming the call and where it was refused.
