// Collectives that autograd differentiates (torch.distributed.nn.functional's): out of place, blocking, and
// recorded, so that gradients flow between ranks. The gradient is that of the sum of all ranks' losses.
//
//   forward          backward
//   broadcast        reduce to src (SUM); zero elsewhere
//   reduce           broadcast from dst
//   all_reduce       all_reduce (SUM)
//   gather           scatter from dst
//   scatter          gather to src; zero elsewhere
//   all_gather       reduce_scatter (SUM)
//   reduce_scatter   all_gather
//   all_to_all       all_to_all; with splits, the other way around
//
// AVG divides the gradient, PREMUL_SUM multiplies it; the other reductions have no gradient and raise
// kUnsupported when one is required. Backward can itself be differentiated.
//
// Backward is collective: every rank must run it, through the same calls in the same order, so every rank's
// input must require a gradient and every rank's result must reach its loss (multiply by 0 where it does not
// matter). It holds the group it was recorded with; a timeout applies to both directions.
// Thread safety: as collectives.h; backward runs on whichever thread autograd chooses.
// Errors as in collectives.h. src and dst are ranks in the world. A process that is not a member gets kUsage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/collective/reduce_op.h"
#include "lockstep/group/process_group.h"

namespace lockstep::differentiable {

// The tail: group (null: the default one), timeout of each operation (unset: the group's), the caller's line.
struct Options {
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
struct ReduceOptions {
  ReduceOp op{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};
struct AllToAllSingleOptions {
  std::vector<std::int64_t> output_split_sizes{};  // rows; empty: equal parts
  std::vector<std::int64_t> input_split_sizes{};
  Group group{};
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};

// The tensor of `src` on every rank; the others pass one of the same size and type.
at::Tensor broadcast(const at::Tensor& tensor, int src, Options options = {});
// The reduction on `dst`; elsewhere the input tensor itself, through which no gradient of its own flows.
at::Tensor reduce(const at::Tensor& tensor, int dst, ReduceOptions options = {});
at::Tensor all_reduce(const at::Tensor& tensor, ReduceOptions options = {});
// Every rank's tensor on `dst`; zeros elsewhere.
std::vector<at::Tensor> gather(const at::Tensor& tensor, int dst = 0, Options options = {});
// tensors[rank] of `src`. Every rank passes one tensor per rank, all of the same size; only those of `src`
// are sent.
at::Tensor scatter(const std::vector<at::Tensor>& tensors, int src = 0, Options options = {});
// Every rank's tensor; all sizes must be equal.
std::vector<at::Tensor> all_gather(const at::Tensor& tensor, Options options = {});
// The reduction of every rank's input_list[rank]. All sizes must be equal.
at::Tensor reduce_scatter(const std::vector<at::Tensor>& input_list, ReduceOptions options = {});
// Entry i is input_tensor_list[rank] of rank i. `output_tensor_list` gives the sizes to receive; its tensors
// are not written.
std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& output_tensor_list,
                                   const std::vector<at::Tensor>& input_tensor_list, Options options = {});
// Sends the rows of `input` to the ranks in order; returns the concatenation of what was received.
at::Tensor all_to_all_single(const at::Tensor& input, AllToAllSingleOptions options = {});

}  // namespace lockstep::differentiable
