// Options of DistributedDataParallel and of replicate, without the classes. Thread safety: plain values.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/mixed_precision.h"
#include "lockstep/group/process_group.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

// Names, order and defaults are those of torch.nn.parallel.DistributedDataParallel.
struct DdpOptions {
  // Of a module on a GPU: none, or the index of that GPU, to which forward() then moves its arguments. Must stay
  // empty for a module on the CPU. output_device is device_ids[0] unless given.
  std::vector<int> device_ids{};
  std::optional<int> output_device{};
  // Rank 0's buffers (such as running statistics) are broadcast before each synced forward.
  bool broadcast_buffers = true;
  // Compare the parameters of all ranks and broadcast rank 0's values. False: the caller guarantees that they
  // are equal.
  bool init_sync = true;
  Group group{};  // null: the default group
  // The ranks of a one-dimensional mesh, for instance the slice mesh["dp"], instead of group.
  std::optional<DeviceMesh> device_mesh{};
  // Size of a gradient bucket in MiB. Unset: 25, and 1 for the first, so that reduction starts early.
  std::optional<double> bucket_cap_mb{};
  // Parameters may get no gradient, on some ranks or all: the graph is traversed after each forward pass, and
  // parameters that are not in it are not waited for.
  bool find_unused_parameters = false;
  // Gradients are views of the buckets: no copy back after the reduction, and half the memory.
  bool gradient_as_bucket_view = false;
  // Gradients of at least this many bytes are allocated in memory that the ranks share and averaged in place:
  // no copy and no extra memory, with or without the option above. While backward() runs, an allocator
  // installed in front of libtorch's serves requests of their sizes. Unset: LOCKSTEP_DDP_IN_PLACE_BYTES, 128
  // KiB, on a GPU, where libtorch's own memory is averaged in place, 8 MiB; SIZE_MAX: all are copied into buckets. Rank 0's value applies to all. During backward() such a
  // gradient must not be accessed once it is computed, and after a failed reduction its value is undefined:
  // call zero_grad().
  std::optional<std::size_t> in_place_bytes{};
  // Every step uses the same parameters the same number of times, recorded in the first. Supports what the
  // graph traversal cannot see: reentrant checkpointing, layers checkpointed twice, parameters used outside
  // forward().
  bool static_graph = false;
  // Compute in a lower-precision type, see mixed_precision.h.
  std::optional<MixedPrecision> mixed_precision{};
  // With find_unused_parameters: buckets that no rank uses are not reduced. They must be the same on all
  // ranks.
  bool skip_all_reduce_unused_params = false;
  // Sizes of the first, second, ... bucket; the last one repeats. Overrides bucket_cap_mb.
  std::vector<double> bucket_cap_mb_list{};
  // Parameters averaged together, outside the buckets, when the gradient of param_to_hook_all_reduce has
  // arrived, which must be after theirs. Their gradients are views of one buffer. Set both or neither; not
  // with find_unused_parameters.
  std::vector<std::string> delay_all_reduce_named_params{};
  std::string param_to_hook_all_reduce{};
  // Parameters and buffers (names as in the module's named_parameters) to exclude: neither synced nor
  // averaged.
  std::vector<std::string> ignored{};
  std::source_location where = std::source_location::current();
};

// Replaces the broadcast of rank 0's buffers. Gets the module's buffers by name, except those in `ignored`;
// the futures it returns are awaited at the end of the next synced backward(). A hook that runs before
// forward() must itself complete what the module is going to read or modify.
struct BufferHook {
  std::function<std::vector<GradFuture>(const torch::OrderedDict<std::string, at::Tensor>& buffers)> run;
  enum class When : std::uint8_t { kBeforeForward, kAfterForward } when = When::kAfterForward;
};

}  // namespace lockstep
