// The collectives. Every member of a group calls the same ones in the same order with the same sizes; a
// mismatch between ranks is an error on all of them, not an overrun. All return a Work, which is complete
// when async_op is false.
//
// Tensors: on the CPU, any strides, any number of elements (including zero), one type for all tensors of a
// call (a complex type may stand for pairs of its real one). Reductions take the integer, bool, floating and
// complex types; collectives that only move data take every type. Results are written to the caller's tensors
// and are not recorded by autograd. Tensors must not be changed before the Work has completed. Tensors that
// share memory, and calls that one rank refuses: see the end of this file.
//
// Roots: src and dst are ranks in the world, group_src and group_dst ranks in the group; give one of the two.
//
// Thread safety: every function may be called from any thread, but all ranks must start the collectives of a
// group in the same order, so threads must not start them concurrently on one group.
//
// Errors: kUsage for bad arguments (before anything is sent, the group stays usable), kUnsupported for what
// the engine cannot do, kPeerLost naming the rank when one dies, kTimeout, kAborted. After any of the last
// three the group is broken and every later operation raises the same error. In a group of one every
// operation is local.
// On a process that is not a member of the group a call only logs a warning; the Work is empty.
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

// The tail every options struct has. Write options in braces at the call, so that `where` is the
// caller's line.
//   group     null: the default group
//   async_op  true: return immediately
//   timeout   unset: the group's; kNoTimeout: none; zero and negative ones raise kUsage
struct AllReduceOptions {
  ReduceOp op{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// In place; bitwise identical on every rank. Memory from empty_shared is reduced in place, without a copy.
// Sparse COO tensors: SUM only, the result is coalesced; its number of entries is exchanged before the call
// returns, even when async_op is true.
Work all_reduce(at::Tensor tensor, AllReduceOptions options = {});

struct BroadcastOptions {
  std::optional<int> src{};  // one of the two is required
  std::optional<int> group_src{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// The values of `src` replace those of all other ranks.
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
// As all_reduce, with the result on `dst` only; the tensors of the other ranks keep their values.
Work reduce(at::Tensor tensor, ReduceOptions options = {});

struct AllGatherOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// outputs[r] becomes rank r's input. One output per rank, of the size of that rank's input: sizes may differ.
Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options = {});
// output is the concatenation on dimension 0, or the stack, of all inputs, which have the same size.
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
// gather_list[r] on `dst` becomes rank r's tensor; all have the same size. The list is given on `dst` only
// and is empty elsewhere.
Work gather(at::Tensor tensor, std::vector<at::Tensor> gather_list = {}, GatherOptions options = {});
// gather_tensor on `dst` becomes the concatenation on dimension 0, or the stack, of all tensors. It is given
// on `dst` only and is undefined elsewhere.
Work gather_single(at::Tensor tensor, at::Tensor gather_tensor = {}, GatherOptions options = {});

struct ScatterOptions {
  std::optional<int> src{};  // neither: rank 0 of the world
  std::optional<int> group_src{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// tensor on rank r becomes scatter_list[r] of `src`; all have the same size. The list is given on `src` only
// and is empty elsewhere.
Work scatter(at::Tensor tensor, std::vector<at::Tensor> scatter_list = {}, ScatterOptions options = {});

struct ReduceScatterOptions {
  ReduceOp op{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// output on rank r becomes the reduction of every rank's inputs[r]. Parts may differ in size; the sizes are
// the same on every rank.
Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceScatterOptions options = {});
// input is the concatenation on dimension 0, or the stack, of one part per rank, all of the same size.
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
// outputs[i] on rank r becomes inputs[r] of rank i. Sizes may differ, but both sides of a pair must agree.
Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                AllToAllOptions options = {});

struct AllToAllSingleOptions {
  // Rows (dimension 0) from and to each rank; empty: equal parts, and the number of rows must be divisible by
  // the group's size.
  std::vector<std::int64_t> output_split_sizes{};
  std::vector<std::int64_t> input_split_sizes{};
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// The parts of the input are sent to the ranks in order; the output is the concatenation of what was
// received, in rank order. Every rank gives splits, or none does.
Work all_to_all_single(at::Tensor output, at::Tensor input, AllToAllSingleOptions options = {});

struct BarrierOptions {
  std::vector<std::int64_t> device_ids{};  // used on GPUs only
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Complete when every rank has entered it and every earlier collective of the group has completed.
Work barrier(BarrierOptions options = {});

struct EmptySharedOptions {
  Group group{};
  at::Device device = at::kCPU;  // or a GPU that an engine of the group serves
  std::source_location where = std::source_location::current();
};
// An uninitialised tensor in memory that all ranks on the same host can access, so that collectives reduce it
// in place, without a copy. A local call, not a collective. Ordinary memory in a world of one, and where the
// engine has none of its own. The tensor
// keeps the group's memory alive, even after destroy_process_group. Raises kResource when the memory cannot
// be allocated.
at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                        EmptySharedOptions options = {});

}  // namespace lockstep

// Tensors that share memory
//  - Inputs may share memory with outputs, in any way: everything is read first. all_gather(outs,
//    outs[rank]), a root's tensor that is its own list entry, all_to_all_single(t, t) and the like work in
//    place; the smaller side is copied.
//  - Two outputs that share memory are refused (kUsage): the data of two ranks cannot both be kept.
//  - broadcast into a tensor whose elements share memory (expand()) works if the received values agree, and
//    so does all_reduce_coalesced of tensors that share memory. If they do not, the rank whose memory cannot
//    hold them raises kUsage after the operation; the other ranks get their results and the group stays
//    usable. Other collectives refuse to write to such a tensor.
//  - A CoalescingScope refuses a tensor that shares memory with one collected before: its calls have no
//    order.
//
// Calls that one rank refuses
// A bad argument is refused before anything is sent. When all ranks refuse the call, the group stays usable.
// When only some do (a root's list, an undefined tensor), the others are inside an operation that cannot
// complete. Every collective has a sequence number that also counts refused ones, and engines that compare
// calls (host, Gloo) compare it: the next collective of the rank that refused raises kUsage on every rank,
// naming the call and where it was refused.
