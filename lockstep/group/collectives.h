// The collectives. Every member of a group calls the same ones in the same order with the same sizes; a mismatch
// between ranks is an error on all of them, not an overrun. All return a Work, which is over when async_op is false.
//
// Errors: kUsage for bad arguments (before anything is sent), kPeerLost naming the rank when one dies, kTimeout,
// kAborted. After any of the last three the group is broken and every later operation raises the same error.
// A group of one: no-ops that still check their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <source_location>

#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep {

// The numbers of torch.distributed.ReduceOp.
enum class ReduceOp : int {
  kSum = 0,
  kAvg = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7
};

// The tail every options struct has. Write options in braces at the call, so that `where` is the caller's line.
//   group     null: the default group
//   async_op  true: return at once
//   timeout   unset: the group's
struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// In place; the same bits on every rank. Any strides; memory from empty_shared is reduced where it lies.
Work all_reduce(at::Tensor tensor, AllReduceOptions options = {});

struct BroadcastOptions {
  int src = 0;  // rank in the world
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// `src`'s values replace everyone's.
Work broadcast(at::Tensor tensor, BroadcastOptions options = {});

struct AllGatherOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// outputs[r] becomes rank r's input. One output per rank, each of the input's size and dtype.
Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options = {});
// output is the concatenation on dimension 0, or the stack, of all inputs.
Work all_gather_into_tensor(at::Tensor output, at::Tensor input, AllGatherOptions options = {});

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::kSum;
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// output on rank r becomes the reduction of every rank's inputs[r].
Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceScatterOptions options = {});
// input is the concatenation on dimension 0, or the stack, of one part per rank.
Work reduce_scatter_tensor(at::Tensor output, at::Tensor input, ReduceScatterOptions options = {});

struct BarrierOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
// Over when every rank has entered it, and every earlier operation of the group is over.
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
