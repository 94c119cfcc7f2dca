// Ways to run a module on several ranks. Each is a value with options; parallelize_module applies them. Names
// and defaults are those of torch.distributed.tensor.parallel. Layouts are placements on the one dimension of
// the mesh. Thread safety: values.
//
//                        parameters                     a plain input is   the module sees   it returns
//   ColwiseParallel      Linear: weight, bias Shard(0)  Replicate          Replicate         Shard(-1)     no collective
//                        Embedding: weight Shard(1)
//   RowwiseParallel      Linear: weight Shard(1), bias  Shard(-1)          Shard(-1)         Replicate     all_reduce
//                        Replicate                                                           Shard(d)      reduce_scatter
//                        Embedding: weight Shard(0)     Replicate          Replicate         Replicate     all_reduce
//   SequenceParallel     LayerNorm, RMSNorm: Replicate  Shard(1)           Shard(1)          Shard(1)      none; backward: one
//                                                                                                          all_reduce per
//                                                                                                          parameter
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "lockstep/dtensor/placement.h"

namespace lockstep {

// Linear and Embedding; others raise kUsage. Unset layouts: as in the table.
struct ColwiseParallel {
  std::optional<Placement> input_layouts{};
  std::optional<Placement> output_layouts{};
  bool use_local_output = true;
};
struct RowwiseParallel {
  std::optional<Placement> input_layouts{};
  std::optional<Placement> output_layouts{};
  bool use_local_output = true;
};

// LayerNorm, and Dropout, which has no parameters and works on any DTensor. RMSNorm: libtorch's C++ modules
// have none, so any module of your own with a parameter "weight" that its forward gives to at::rms_norm (or
// at::layer_norm). Parameters are not broadcast: they are assumed to be equal on all ranks, as torch does.
struct SequenceParallel {
  std::int64_t sequence_dim = 1;
  bool use_local_output = false;
};

// For modules whose forward calls prepare_inputs and prepare_outputs (prepare.h). One entry per argument, or
// result; none: leave it as it is. Lists of one pair must be of one length.
struct PrepareModuleInput {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_output = false;
};
struct PrepareModuleOutput {
  std::vector<std::optional<Placement>> output_layouts{};
  std::vector<std::optional<Placement>> desired_output_layouts{};
  bool use_local_output = true;
};
struct PrepareModuleInputOutput {
  PrepareModuleInput input{};
  PrepareModuleOutput output{};
};

// Colwise and Rowwise in turn over the Linear layers directly below a module, which must be even in number.
// Input and output are replicated.
struct PairwiseParallel {};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput,
                                   PrepareModuleOutput, PrepareModuleInputOutput, PairwiseParallel>;

}  // namespace lockstep
