#include "lockstep/dtensor/internal/random.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/redistribute.h"
#include "lockstep/dtensor/random.h"

namespace lockstep {
namespace dtensor_internal {
namespace {

// The operators that only write: what the tensor holds before does not matter.
bool only_writes(const std::string& name) {
  constexpr const char* kNames[] = {"aten::bernoulli_.float", "aten::cauchy_",     "aten::exponential_",
                                    "aten::geometric_",       "aten::log_normal_", "aten::normal_",
                                    "aten::random_",          "aten::uniform_"};
  return std::ranges::any_of(kNames, [&](const char* known) { return name.starts_with(known); });
}

// The layout of a random result: the first input's, but a random number cannot be a partial sum.
const Layout* result_layout(const OpCall& call) {
  auto placements = call.inputs()[0].layout->placements;
  std::ranges::replace_if(
      placements, [](const Placement& p) { return p.is_partial(); }, Replicate());
  return call.mesh()->layout(placements);
}

// A result of other sizes than the input is kept whole, as a replica.
c10::IValue keep_piece(const OpCall& call, const c10::IValue& value, const Layout* layout) {
  if (!value.isTensor()) return value;
  const auto whole = value.toTensor();
  const bool same = whole.sizes() == call.inputs()[0].sizes;
  const auto* own = same ? layout : call.mesh()->layout(Placements(call.mesh()->ndim()));
  auto result = wrap(slice_for(whole, *own).clone(), whole.sizes(), call.mesh(), own);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(whole.sizes(), whole.strides());
  return result;
}

at::Generator shared_generator(const OpCall& call) {
  auto shared = call.mesh()->generator();
  if (!shared.defined()) {
    base::raise(
        ErrorKind::kUsage,
        base::cat(call.describe(),
                  ": random numbers of a sharded tensor need a seed that all ranks of the mesh share; "
                  "call lockstep::manual_seed(seed, mesh) on each of them first"));
  }
  return shared;
}

// (result, mask) of native_dropout, which takes no generator: the mesh's one makes the mask.
void run_dropout(const OpCall& call, torch::jit::Stack& stack) {
  const auto p = call.value(1).toDouble();
  const bool drops = p > 0 && (call.value(2).isNone() || call.value(2).toBool());
  const auto generator = drops ? shared_generator(call) : at::Generator();
  const auto& input = call.inputs()[0];
  const auto* layout = result_layout(call);
  const at::AutoDispatchBelowADInplaceOrView below;
  auto local = redistribute_local(input.local, input.sizes, *input.layout, *layout);
  auto mask = at::ones_like(local, local.options().dtype(at::kBool));
  if (drops) {
    const auto whole = at::empty(input.sizes, mask.options()).bernoulli_(1 - p, generator);
    mask = slice_for(whole, *layout).clone();
    local = local.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p));
  }
  const auto sizes = input.sizes.vec();
  const auto mesh = call.mesh();
  torch::jit::drop(stack, call.op().arguments.size());
  stack.emplace_back(wrap(std::move(local), sizes, mesh, layout));
  stack.emplace_back(wrap(std::move(mask), sizes, mesh, layout));
}

}  // namespace

void run_random(OpCall& call, torch::jit::Stack& stack) {
  const auto& op = call.op();
  if (op.name == "aten::native_dropout") return run_dropout(call, stack);
  const auto base = stack.size() - op.arguments.size();
  const auto generator = op.argument("generator");
  if (generator < 0) {
    base::raise(ErrorKind::kUnsupported,
                base::cat(call.describe(),
                          ": takes no generator, so that ranks would draw different numbers; "
                          "draw with bernoulli or dropout instead"));
  }
  auto& given = stack[base + static_cast<std::size_t>(generator)];
  if (given.isNone()) given = shared_generator(call);
  const at::AutoDispatchBelowADInplaceOrView below;
  // The operator runs on tensors of the global sizes, so that it draws the same numbers in the same order on
  // every rank and the generators stay in step.
  const auto* replicated = call.mesh()->layout(Placements(call.mesh()->ndim()));
  c10::IValue written;
  call.own_tensors();
  for (auto& input : call.inputs()) {
    auto& slot = stack[base + static_cast<std::size_t>(input.argument)];
    if (input.written) written = slot;
    slot = input.written && only_writes(op.name)
               ? at::empty(input.sizes, input.local.options())
               : redistribute_local(input.local, input.sizes, *input.layout, *replicated);
    if (input.written && !only_writes(op.name)) slot = slot.toTensor().clone();
  }
  const auto* layout = result_layout(call);
  op.handle.callBoxed(stack);
  const auto first = stack.size() - op.result_is.size();
  for (std::size_t r = 0; r < op.result_is.size(); ++r) {
    auto& value = stack[first + r];
    if (!op.result_is[r]) {
      value = keep_piece(call, value, layout);
      continue;
    }
    const auto& meta = meta_of(written.toTensor());
    const auto whole = value.toTensor();
    meta.local().copy_(redistribute_local(whole, whole.sizes(), *replicated, *meta.layout()));
    value = written;
  }
}

}  // namespace dtensor_internal

void manual_seed(std::uint64_t seed, const DeviceMesh& mesh) {
  const auto context = dtensor_internal::MeshContext::of(mesh, "manual_seed");
  const auto device = c10::Device(mesh.device_type());
  auto generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed);
  context->set_generator(std::move(generator));
}

}  // namespace lockstep
