#include "lockstep/collective/differentiable.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"

namespace lockstep::differentiable {
namespace {

using torch::autograd::variable_list;
using Step = std::function<variable_list(const variable_list&)>;

// What a node of the graph keeps for its backward: the group above all, since the thread that runs it may
// have none.
struct Kept final : torch::CustomClassHolder {
  explicit Kept(Step step) : backward(std::move(step)) {}
  Step backward;
};

// One node of the graph from two steps, each of which takes and returns a list of tensors. The steps are its
// last two inputs, hence the two gradients that are missing in backward.
class Recorded final : public torch::autograd::Function<Recorded> {
 public:
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                               const Step& forward, const Step& backward) {
    context->saved_data["kept"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(backward));
    variable_list plain;
    for (const auto& input : inputs) plain.push_back(input.detach());
    return forward(plain);
  }
  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    const auto kept = context->saved_data["kept"].toCapsule();
    // The backward steps below call functions of this file, not the plain collectives: with create_graph the
    // backward pass is recorded in turn, and a second derivative is again a collective on every rank.
    auto results = static_cast<const Kept&>(*kept).backward(gradients);
    results.resize(results.size() + 2);  // the two steps have no gradient
    return results;
  }
};

variable_list record(const variable_list& inputs, const Step& forward, const Step& backward) {
  return Recorded::apply(at::TensorList(inputs), forward, backward);
}

// The group the call is for, never null. Resolved here, on the caller's thread, and captured by both steps:
// the autograd thread that runs backward may belong to another rank thread, or to none, and would find
// another default group.
template <class Options>
Options held(const char* name, Options options, at::TensorList inputs) {
  if (!options.group) options.group = default_group();
  const auto refuse = [&](const auto&... parts) {
    base::raise(ErrorKind::kUsage,
                base::cat("differentiable::", name, " of group \"", options.group->name(), "\" (called at ",
                          options.where.file_name(), ":", options.where.line(), "): ", parts...));
  };
  if (!is_group_member(options.group)) refuse("this process is not a member of the group");
  for (const auto& input : inputs) {
    if (!input.defined()) refuse("an input is an undefined tensor");
  }
  return options;
}

// One tensor per rank, all alike.
template <class Options>
void check_alike(const char* name, const Options& options, const variable_list& tensors) {
  const auto n = static_cast<std::size_t>(options.group->size());
  const bool alike = std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.sizes() == tensors.front().sizes() && tensor.scalar_type() == tensors.front().scalar_type();
  });
  if (tensors.size() != n || !alike) {
    base::raise(ErrorKind::kUsage,
                base::cat("differentiable::", name, " (called at ", options.where.file_name(), ":",
                          options.where.line(), "): needs ", n,
                          " tensors of one size and type, one per rank; got ", tensors.size()));
  }
}

// Raised by the forward call; in backward the error would come out of the autograd engine, far from its
// cause.
void check_gradient(const char* name, const ReduceOptions& options, at::TensorList inputs) {
  const auto op = options.op.kind();
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum ||
      !at::GradMode::is_enabled())
    return;
  if (std::ranges::any_of(inputs, [](const at::Tensor& input) { return input.requires_grad(); })) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("differentiable::", name, " (called at ", options.where.file_name(), ":",
                          options.where.line(), "): ", name_of(op),
                          " has no gradient across ranks; use SUM or AVG, or detach() the input"));
  }
}

// The options of the collective below.
template <class Below, class Options>
Below below(Below call, const Options& options) {
  call.group = options.group;
  call.timeout = options.timeout;
  call.where = options.where;
  return call;
}

template <class Some>
Options plain(const Some& options) {
  return {.group = options.group, .timeout = options.timeout, .where = options.where};
}
template <class Some>
ReduceOptions summed(const Some& options) {
  return {.op = ReduceOp::kSum, .group = options.group, .timeout = options.timeout, .where = options.where};
}

// What AVG and PREMUL_SUM make of a gradient. The output is sum(factor * x): by the chain rule the summed
// gradient is multiplied by the same factor, which is this rank's own for PREMUL_SUM.
at::Tensor scaled(const at::Tensor& gradient, const ReduceOptions& options) {
  if (options.op.kind() == ReduceOp::kAvg) return gradient.div(options.group->size());
  if (options.op.kind() == ReduceOp::kPremulSum)
    return gradient.mul(options.op.factor().to(gradient.scalar_type()));
  return gradient;
}

// The collectives work in place, but the inputs of a node must keep their values: each forward step writes to
// memory of its own.
at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous);
}
at::Tensor room_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().requires_grad(false));
}

bool is_here(const Group& group, int world_rank) {
  return group->ranks()[static_cast<std::size_t>(group->rank())] == world_rank;
}

using Sizes = std::vector<std::vector<std::int64_t>>;

Sizes sizes_of(const variable_list& tensors) {
  Sizes sizes;
  for (const auto& tensor : tensors) sizes.push_back(tensor.sizes().vec());
  return sizes;
}

variable_list all_to_all_sized(const Sizes& sizes, const variable_list& inputs, const Options& options) {
  const auto forward = [=](const variable_list& sent) -> variable_list {
    variable_list outputs;
    for (const auto& size : sizes) outputs.push_back(at::empty(size, sent.front().options()));
    lockstep::all_to_all(outputs, sent, below(AllToAllOptions{}, options));
    return outputs;
  };
  // The transpose: what was received goes back to where it came from, so the sizes of the inputs are those of
  // the results. all_to_all is its own transpose; broadcast and reduce, gather and scatter, all_gather and
  // reduce_scatter are each other's.
  const auto backward = [=, back = sizes_of(inputs)](const variable_list& gradients) {
    return all_to_all_sized(back, gradients, options);
  };
  return record(inputs, forward, backward);
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, int src, Options given) {
  const auto options = held("broadcast", std::move(given), tensor);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto output = copy_of(inputs.front());
    lockstep::broadcast(output, below(BroadcastOptions{.src = src}, options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    auto sum = reduce(gradients.front(), src, summed(options));
    // reduce leaves the other ranks with their own gradient, but their input did not contribute to any
    // output.
    if (!is_here(options.group, src)) sum.zero_();
    return {sum};
  };
  return record({tensor}, forward, backward).front();
}

at::Tensor reduce(const at::Tensor& tensor, int dst, ReduceOptions given) {
  const auto options = held("reduce", std::move(given), tensor);
  check_gradient("reduce", options, tensor);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto output = copy_of(inputs.front());
    lockstep::reduce(output, below(lockstep::ReduceOptions{.dst = dst, .op = options.op}, options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    return {scaled(broadcast(gradients.front(), dst, plain(options)), options)};
  };
  return record({tensor}, forward, backward).front();
}

at::Tensor all_reduce(const at::Tensor& tensor, ReduceOptions given) {
  const auto options = held("all_reduce", std::move(given), tensor);
  check_gradient("all_reduce", options, tensor);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto output = copy_of(inputs.front());
    lockstep::all_reduce(output, below(AllReduceOptions{.op = options.op}, options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    return {scaled(all_reduce(gradients.front(), summed(options)), options)};
  };
  return record({tensor}, forward, backward).front();
}

std::vector<at::Tensor> gather(const at::Tensor& tensor, int dst, Options given) {
  const auto options = held("gather", std::move(given), tensor);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    variable_list outputs;
    // Zeros also on the ranks that receive nothing: these outputs lead to the backward step, a scatter that
    // needs one gradient per rank on all of them.
    for (int r = 0; r < options.group->size(); ++r) outputs.push_back(at::zeros_like(inputs.front()));
    lockstep::gather(inputs.front(), is_here(options.group, dst) ? outputs : variable_list(),
                     below(GatherOptions{.dst = dst}, options));
    return outputs;
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    return {scatter(gradients, dst, options)};
  };
  return record({tensor}, forward, backward);
}

at::Tensor scatter(const std::vector<at::Tensor>& tensors, int src, Options given) {
  const auto options = held("scatter", std::move(given), tensors);
  check_alike("scatter", options, tensors);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto output = room_like(inputs.front());
    lockstep::scatter(output, is_here(options.group, src) ? inputs : variable_list(),
                      below(ScatterOptions{.src = src}, options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) {
    return gather(gradients.front(), src, options);
  };
  return record(tensors, forward, backward).front();
}

std::vector<at::Tensor> all_gather(const at::Tensor& tensor, Options given) {
  const auto options = held("all_gather", std::move(given), tensor);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    variable_list outputs;
    for (int r = 0; r < options.group->size(); ++r) outputs.push_back(room_like(inputs.front()));
    lockstep::all_gather(outputs, inputs.front(), below(AllGatherOptions{}, options));
    return outputs;
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    return {reduce_scatter(gradients, summed(options))};
  };
  return record({tensor}, forward, backward);
}

at::Tensor reduce_scatter(const std::vector<at::Tensor>& input_list, ReduceOptions given) {
  const auto options = held("reduce_scatter", std::move(given), input_list);
  check_alike("reduce_scatter", options, input_list);
  check_gradient("reduce_scatter", options, input_list);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto output = room_like(inputs.front());
    lockstep::reduce_scatter(output, inputs, below(ReduceScatterOptions{.op = options.op}, options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) {
    auto parts = all_gather(gradients.front(), plain(options));
    for (auto& part : parts) part = scaled(part, options);
    return parts;
  };
  return record(input_list, forward, backward).front();
}

std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& output_tensor_list,
                                   const std::vector<at::Tensor>& input_tensor_list, Options given) {
  auto options = held("all_to_all", std::move(given), input_tensor_list);
  options = held("all_to_all", std::move(options), output_tensor_list);
  const auto n = static_cast<std::size_t>(options.group->size());
  if (output_tensor_list.size() != n || input_tensor_list.size() != n) {
    base::raise(ErrorKind::kUsage,
                base::cat("differentiable::all_to_all (called at ", options.where.file_name(), ":",
                          options.where.line(), "): the lists have ", output_tensor_list.size(), " and ",
                          input_tensor_list.size(), " tensors; give one per rank, ", n));
  }
  return all_to_all_sized(sizes_of(output_tensor_list), input_tensor_list, options);
}

at::Tensor all_to_all_single(const at::Tensor& input, AllToAllSingleOptions given) {
  const auto options = held("all_to_all_single", std::move(given), input);
  const auto forward = [=](const variable_list& inputs) -> variable_list {
    auto sizes = inputs.front().sizes().vec();
    const auto& rows = options.output_split_sizes;
    // Negative or wrong splits are refused by the collective itself, which names the caller; the output needs
    // valid sizes before that.
    if (!rows.empty() && !sizes.empty())
      sizes.front() = std::max<std::int64_t>(0, std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
    auto output = at::empty(sizes, inputs.front().options());
    lockstep::all_to_all_single(
        output, inputs.front(),
        below(lockstep::AllToAllSingleOptions{.output_split_sizes = rows,
                                              .input_split_sizes = options.input_split_sizes},
              options));
    return {output};
  };
  const auto backward = [=](const variable_list& gradients) -> variable_list {
    auto back = options;
    std::swap(back.output_split_sizes, back.input_split_sizes);
    return {all_to_all_single(gradients.front(), back)};
  };
  return record({input}, forward, backward).front();
}

}  // namespace lockstep::differentiable
