#include "lockstep/parallel/parallelize.h"

#include <fnmatch.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <sstream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/dtensor/detail/operand_style.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/parallel/internal/module_layouts.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep {
namespace {

using torch::nn::Module;

// One parameter of a plan: where it goes. Nothing is sent before the whole plan is known to fit.
struct Change {
  at::Tensor parameter;  // the module's own: its data is replaced
  Placement placement;
  std::optional<OperandStyle> style;
  bool broadcast = true;
};
struct Changes {
  const DeviceMesh& mesh;
  std::vector<Change> changes;
  std::vector<std::pair<Module*, PrepareModuleInputOutput>> layouts;
};

[[noreturn]] void refuse(const std::string& path, const Module& module, const std::string& why) {
  base::raise(ErrorKind::kUsage,
              base::cat("parallelize_module: \"", path, "\" (", module.name(), "): ", why));
}

OperandStyle style_of(OperandStyle::Kind kind, const Placement& input, const Placement& desired,
                      const Placement& output, bool local) {
  return {.kind = kind,
          .input = {input},
          .desired_input = {desired},
          .output = {output},
          .use_local_output = local};
}

void add_linear(Changes& work, torch::nn::LinearImpl& linear, const Placement& weight, const Placement& bias,
                const OperandStyle& style) {
  work.changes.push_back({linear.weight, weight, style});
  if (linear.bias.defined()) work.changes.push_back({linear.bias, bias, style});
}

// The plan_module functions only append to `work` or raise; make_changes() sends and changes. A Linear
// multiplies by the transpose of its weight: the columns of that matrix are dimension 0 of the weight.
void plan_module(Changes& work, const std::string& path, Module& module, const ColwiseParallel& style) {
  const auto around = [&](OperandStyle::Kind kind) {
    return style_of(kind, style.input_layouts.value_or(Replicate()), Replicate(),
                    style.output_layouts.value_or(Shard(-1)), style.use_local_output);
  };
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
    add_linear(work, *linear, Shard(0), Shard(0), around(OperandStyle::Kind::kLinear));
  } else if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
    work.changes.push_back({embedding->weight, Shard(1), around(OperandStyle::Kind::kEmbedding)});
  } else {
    refuse(path, module, "ColwiseParallel is for Linear and Embedding");
  }
}

// Each rank has some of the inputs and computes partial sums, which are reduced to the output layout. The
// bias must be added once to the sum: it is replicated, not sharded.
void plan_module(Changes& work, const std::string& path, Module& module, const RowwiseParallel& style) {
  const auto output = style.output_layouts.value_or(Replicate());
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
    add_linear(work, *linear, Shard(1), Replicate(),
               style_of(OperandStyle::Kind::kLinear, style.input_layouts.value_or(Shard(-1)), Shard(-1),
                        output, style.use_local_output));
  } else if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
    work.changes.push_back(
        {embedding->weight, Shard(0),
         style_of(OperandStyle::Kind::kEmbedding, style.input_layouts.value_or(Replicate()), Replicate(),
                  output, style.use_local_output)});
  } else {
    refuse(path, module, "RowwiseParallel is for Linear and Embedding");
  }
}

// libtorch's C++ modules have no RMSNorm. One of the user's own is known by its weight, which it gives to
// rms_norm or layer_norm.
bool is_own_norm(const Module& module) {
  return !module.name().starts_with("torch::nn::") && module.named_parameters(false).contains("weight");
}

void plan_module(Changes& work, const std::string& path, Module& module, const SequenceParallel& style) {
  if (dynamic_cast<torch::nn::DropoutImpl*>(&module)) return;
  const auto parameters = module.named_parameters(false);
  if (dynamic_cast<torch::nn::LayerNormImpl*>(&module)) {
    if (parameters.is_empty()) {
      refuse(path, module,
             "a LayerNorm without parameters works on a DTensor as it is; give it one (use_local_output = "
             "false of the module before)");
    }
  } else if (!is_own_norm(module)) {
    refuse(path, module,
           "SequenceParallel is for LayerNorm and Dropout, and for modules of your own with a parameter "
           "\"weight\" that they give to at::rms_norm or at::layer_norm");
  }
  const Shard sequence(style.sequence_dim);
  for (const auto& item : parameters) {
    std::optional<OperandStyle> around;
    if (item.key() == "weight") {
      around = style_of(OperandStyle::Kind::kNorm, sequence, sequence, sequence, style.use_local_output);
    }
    // Not broadcast: the ranks' own values, which must be equal.
    work.changes.push_back({item.value(), Replicate(), around, false});
  }
}

void plan_module(Changes& work, const std::string& path, Module& module,
                 const PrepareModuleInputOutput& style) {
  if (style.input.input_layouts.size() != style.input.desired_input_layouts.size() ||
      style.output.output_layouts.size() != style.output.desired_output_layouts.size()) {
    refuse(path, module, "the lists of layouts and of desired layouts must be of one length");
  }
  work.layouts.emplace_back(&module, style);
}
void plan_module(Changes& work, const std::string& path, Module& module, const PrepareModuleInput& style) {
  plan_module(work, path, module, PrepareModuleInputOutput{.input = style});
}
void plan_module(Changes& work, const std::string& path, Module& module, const PrepareModuleOutput& style) {
  plan_module(work, path, module, PrepareModuleInputOutput{.output = style});
}

void plan_module(Changes& work, const std::string& path, Module& module, const PairwiseParallel&) {
  std::vector<std::pair<std::string, Module*>> linears;
  for (const auto& child : module.named_children()) {
    if (dynamic_cast<torch::nn::LinearImpl*>(child.value().get()))
      linears.emplace_back(child.key(), child.value().get());
  }
  if (linears.empty() || linears.size() % 2 != 0) {
    refuse(path, module,
           base::cat("PairwiseParallel needs an even number of Linear layers directly below it; there are ",
                     linears.size()));
  }
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const auto& [name, linear] = linears[i];
    // Between the two of a pair the activations stay sharded.
    if (i % 2 == 0) plan_module(work, path + "." + name, *linear, ColwiseParallel{});
    if (i % 2 == 1) plan_module(work, path + "." + name, *linear, RowwiseParallel{});
  }
}

std::vector<std::string> tokens_of(const std::string& path) {
  std::vector<std::string> tokens;
  std::istringstream in(path);
  for (std::string token; std::getline(in, token, '.');) tokens.push_back(token);
  return tokens;
}

// Everything that a path with patterns names.
void find(Module& module, const std::string& at, const std::vector<std::string>& tokens, std::size_t next,
          std::vector<std::pair<std::string, Module*>>& found) {
  if (next == tokens.size()) {
    found.emplace_back(at, &module);
    return;
  }
  for (const auto& child : module.named_children()) {
    if (fnmatch(tokens[next].c_str(), child.key().c_str(), 0) != 0) continue;
    find(*child.value(), at.empty() ? child.key() : at + "." + child.key(), tokens, next + 1, found);
  }
}

void make_changes(const Changes& work, const ParallelizeOptions& options) {
  for (const auto& change : work.changes) {
    auto parameter = change.parameter;
    distribute_parameter(parameter, work.mesh, {change.placement},
                         {.src_data_rank = change.broadcast ? options.src_data_rank : std::nullopt});
    if (change.style) {
      // set_data() replaces the data behind the same Parameter, so that optimizers made before still hold it.
      const bool needs_gradient = parameter.requires_grad();
      parameter.set_data(with_style(parameter.detach(), *change.style));
      parameter.set_requires_grad(needs_gradient);
    }
  }
  for (const auto& [module, layouts] : work.layouts)
    internal::ModuleLayouts::give(*module, work.mesh, layouts);
}

// A gradient may arrive in other placements than its parameter's, above all partial, and every operator of an
// optimizer that reads it would reduce it again. Redistributed once, as it arrives.
void place_gradients(const at::Tensor& parameter) {
  if (!parameter.requires_grad()) return;
  // Weak: the parameter owns its hooks.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  parameter.register_hook([weak = Weak(parameter.getIntrusivePtr())](const at::Tensor& gradient) {
    const at::Tensor owner(weak.lock());
    return owner.defined() ? internal::placed_as(gradient, owner) : gradient;
  });
}

}  // namespace

void distribute_parameter(at::Tensor& parameter, const DeviceMesh& mesh, Placements placements,
                          ParallelizeOptions options) {
  // Once per parameter: the hook stays when the parameter is distributed again, and reads its placements when
  // it runs.
  if (!is_dtensor(parameter)) place_gradients(parameter);
  const at::AutoGradMode no_grad(false);
  parameter.set_data(distribute_tensor(parameter.detach(), mesh, std::move(placements),
                                       {.src_data_rank = options.src_data_rank}));
  // A plain gradient would not fit a sharded parameter.
  parameter.mutable_grad() = at::Tensor();
}

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        ParallelizeOptions options) {
  if (mesh.ndim() != 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("parallelize_module: the mesh has ", mesh.ndim(),
                          " dimensions; give the one for tensor parallelism, mesh[\"tp\"]"));
  }
  if (plan.empty())
    base::log(LogLevel::kWarn, "parallelize_module: the plan is empty, nothing is parallelized");
  // The whole plan is matched before anything is changed. The module and the plan must be the same on every
  // rank; then all raise, or none.
  Changes work{mesh, {}, {}};
  for (const auto& [path, style] : plan) {
    std::vector<std::pair<std::string, Module*>> found;
    find(module, "", tokens_of(path), 0, found);
    if (found.empty())
      base::log(LogLevel::kWarn, base::cat("parallelize_module: no submodule is called \"", path, "\""));
    for (const auto& match : found) {
      std::visit([&](const auto& chosen) { plan_module(work, match.first, *match.second, chosen); }, style);
    }
  }
  make_changes(work, options);
}

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelStyle& style,
                        ParallelizeOptions options) {
  parallelize_module(module, mesh, ParallelPlan{{"", style}}, options);
}

void distribute_module(Module& module, const DeviceMesh& mesh, const PartitionFn& partition_fn,
                       const PlaceFn& input_fn, const PlaceFn& output_fn) {
  if (partition_fn) {
    partition_fn("", module, mesh);
    for (const auto& item : module.named_modules("", false)) partition_fn(item.key(), *item.value(), mesh);
  }
  const auto replicate = [&](at::Tensor tensor) {
    if (!tensor.defined() || is_dtensor(tensor)) return;
    distribute_parameter(tensor, mesh, Placements(static_cast<std::size_t>(mesh.ndim())));
  };
  // In the order of registration, the same on all ranks: each replica is a broadcast.
  for (const auto& parameter : module.parameters()) replicate(parameter);
  for (const auto& buffer : module.buffers()) replicate(buffer);
  if (input_fn || output_fn)
    internal::ModuleLayouts::give(module, mesh, {}, {.input = input_fn, .output = output_fn});
}

}  // namespace lockstep
