// The kernel that every operator on sharded tensors runs through, and its installation at kKey. One call:
//
//   OpCall     which tensors, on which mesh            errors here are raised before anything is sent,
//   decide     where they must be and what comes out     alike on every rank
//   redistribute the inputs in other layouts           collectives
//   run        the operator on the local tensors, below autograd
//   wrap       the results
//
// Autograd is above: libtorch records the operator on the sharded tensors as on any others, and the backward
// formulas are again operators on sharded tensors that come through here.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/dtensor/detail/loss_flag.h"
#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/random.h"
#include "lockstep/dtensor/internal/redistribute.h"
#include "lockstep/dtensor/internal/strides.h"

namespace lockstep::dtensor_internal {
namespace {

using torch::jit::Stack;

thread_local bool losses_stay_sharded = false;

bool loss_parallel() {
  return losses_stay_sharded;
}

// One per operator. Called from any thread; nothing in it changes after the first call.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(c10::OperatorHandle handle) : handle_(std::move(handle)) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    const auto& op = facts();
    const auto n_arguments = op.arguments.size();
    OpCall call(op, &(*stack)[stack->size() - n_arguments]);
    check(call);
    // The order of the branches matters: what writes where it cannot is rewritten first, and comes back here
    // as the functional operator; random operators draw for the whole tensor and need no decision.
    if (op.writes && (!op.in_place || op.reshapes || writes_plain(call))) return run_and_store(call, *stack);
    if (op.is_random) return run_random(call, *stack);
    auto key = call.key();
    auto& cache = call.mesh()->decisions();
    const auto* decision = cache.find(key);
    if (!decision) {
      note_default(op);
      decision = cache.add(std::move(key), decide(call));
    }
    if (decision->by_copy) return run_otherwise(call, *stack);
    if (op.is_loss && decision->redistributes && loss_parallel()) keep_sharded(call, *decision);
    run(call, *decision, *stack);
  }

 private:
  // Read from the schema at the first call: 3,500 operators are registered, few are called.
  const Operator& facts() {
    std::call_once(once_, [&] { operator_ = read_operator(handle_); });
    return *operator_;
  }

  // Once per operator and process.
  void note_default(const Operator& op) {
    if (op.rule || op.loops || noted_.exchange(true, std::memory_order_relaxed)) return;
    base::log(LogLevel::kDebug, base::cat("dtensor: ", op.name, " has no rule: its inputs are replicated"));
  }

  static void check(const OpCall& call) {
    if (!call.mesh())
      base::raise(ErrorKind::kInternal, base::cat(call.op().name, ": no sharded tensor among the arguments"));
    if (call.op().changes_memory) {
      base::raise(
          ErrorKind::kUsage,
          base::cat(call.describe(),
                    ": a sharded tensor has no memory of its own to resize or replace; use to_local()"));
    }
  }

  // For losses inside a LossParallelScope.
  static void keep_sharded(const OpCall& call, const Decision& decision) {
    for (std::size_t i = 0; i < call.inputs().size(); ++i) {
      const auto& now = call.inputs()[i].layout->placements;
      for (std::size_t m = 0; m < now.size(); ++m) {
        if (!now[m].is_shard() || !decision.inputs[i]->placements[m].is_replicate()) continue;
        base::raise(ErrorKind::kUnsupported,
                    base::cat(call.describe(),
                              ": this loss would gather a sharded input, which is what "
                              "LossParallelScope forbids. cross_entropy_loss and nll_loss "
                              "of [n, classes] keep their classes sharded; for others "
                              "redistribute the input, or leave the scope"));
      }
    }
  }

  // Moves the inputs, puts the local tensors in place of the sharded ones and calls the operator.
  void run(OpCall& call, const Decision& decision, Stack& stack) const {
    const auto& op = call.op();
    // Autograd has recorded this call already; the local operators must not be recorded again.
    const at::AutoDispatchBelowADInplaceOrView below;
    bool lost_base = false;
    for (std::size_t i = 0; i < call.inputs().size(); ++i) {
      auto& input = call.inputs()[i];
      lost_base = lost_base || (op.is_view && input.lost_base);
      if (input.layout == decision.inputs[i]) continue;
      lost_base = lost_base || op.is_view;
      input.local = redistribute_local(input.local, input.sizes, *input.layout, *decision.inputs[i]);
    }
    // Results that are a written argument are that tensor itself.
    c10::SmallVector<c10::IValue, 1> written(op.result_is.size());
    const auto base = stack.size() - op.arguments.size();
    for (std::size_t r = 0; r < op.result_is.size(); ++r) {
      if (op.result_is[r]) written[r] = stack[base + *op.result_is[r]];
    }
    if (op.rule && op.rule->finish) call.keep_arguments();
    localise(call, decision, stack);
    LocalCall local{call, decision, stack};
    if (op.rule && op.rule->local) {
      op.rule->local(local);
      lost_base = lost_base || local.lost_base;
    } else {
      local.run();
    }
    if (op.rule && op.rule->finish) finish(call, decision, stack);
    // The engine detaches a gradient to keep it, and has no use for what it was a view of.
    if (lost_base && op.name == "aten::detach")
      lost_base = torch::autograd::get_current_graph_task_id() == -1;
    const auto first = stack.size() - op.result_is.size();
    for (std::size_t r = 0; r < op.result_is.size(); ++r) {
      auto& value = stack[first + r];
      value =
          op.result_is[r] ? std::move(written[r]) : wrapped(call, decision, r, std::move(value), lost_base);
    }
  }

  // References change hands instead of being counted, which a small operator would feel.
  static void localise(OpCall& call, const Decision& decision, Stack& stack) {
    const auto& op = call.op();
    const bool needed_later = op.writes || (op.rule && (op.rule->local || op.rule->finish));
    const auto base = stack.size() - op.arguments.size();
    for (auto& input : call.inputs()) {
      const auto a = static_cast<std::size_t>(input.argument);
      if (op.arguments[a] != ArgumentKind::kTensor) continue;
      auto& slot = stack[base + a];
      input.tensor = c10::MaybeOwned<at::Tensor>::owned(std::move(slot).toTensor());
      slot = needed_later ? input.local : std::move(input.local);
    }
    for (std::size_t a = 0; a < op.arguments.size(); ++a) {
      if (op.arguments[a] == ArgumentKind::kTensors)
        stack[base + a] = local_list(call, static_cast<int>(a), stack[base + a]);
    }
    if (op.rule && op.rule->sizes_argument && !decision.result_sizes.empty()) {
      stack[base + static_cast<std::size_t>(op.sizes_argument)] = decision.local_result_sizes;
    }
  }

  static void finish(const OpCall& call, const Decision& decision, Stack& stack) {
    const auto first = stack.size() - call.op().result_is.size();
    std::vector<at::Tensor> results;
    for (std::size_t r = 0; r < call.op().result_is.size(); ++r) {
      const auto& local = stack[first + r].toTensor();
      results.push_back(redistribute_local(local, result_sizes(call, decision, r, local),
                                           *decision.raw_results[r], *decision.results[r]));
    }
    call.op().rule->finish(call, results);
    for (std::size_t r = 0; r < results.size(); ++r) stack[first + r] = std::move(results[r]);
  }

  static c10::IValue local_list(const OpCall& call, int argument, const c10::IValue& value) {
    if (value.isNone()) return value;
    if (value.isTensorList()) {
      std::vector<at::Tensor> locals(value.toTensorVector().size());
      for (const auto& input : call.inputs()) {
        if (input.argument == argument) locals[static_cast<std::size_t>(input.item)] = input.local;
      }
      return locals;
    }
    c10::List<std::optional<at::Tensor>> locals;
    const auto n = value.toListRef().size();
    for (std::size_t i = 0; i < n; ++i) {
      const auto at = call.input_of(argument, static_cast<int>(i));
      locals.push_back(at < 0 ? std::optional<at::Tensor>()
                              : call.inputs()[static_cast<std::size_t>(at)].local);
    }
    return locals;
  }

  using ResultSizes = c10::SmallVector<std::int64_t, 6>;
  // The global sizes of result `r`, of which a rank has `local`: where a dimension is cut, those of the input
  // it comes from.
  static ResultSizes result_sizes(const OpCall& call, const Decision& decision, std::size_t r,
                                  const at::Tensor& local) {
    ResultSizes sizes(local.sizes().begin(), local.sizes().end());
    if (r == 0 && decision.result_sizes.size() == sizes.size() && !sizes.empty()) {
      sizes.assign(decision.result_sizes.begin(), decision.result_sizes.end());
      return sizes;
    }
    for (const auto& placement : decision.results[r]->placements) {
      if (!placement.is_shard()) continue;
      const auto d = static_cast<std::size_t>(placement.dim());
      const auto& source = decision.sources[r][d];
      sizes[d] =
          call.inputs()[static_cast<std::size_t>(source.input)].sizes[static_cast<std::size_t>(source.dim)];
    }
    return sizes;
  }

  static at::Tensor wrap_result(const OpCall& call, const Decision& decision, std::size_t r,
                                const at::Tensor& local, bool lost_base) {
    if (!local.defined()) return local;
    // torch::nn::Linear multiplies by the transpose of its weight, which therefore has the weight's style.
    std::shared_ptr<const OperandStyle> style;
    if (call.op().is_transpose && !call.inputs()[0].plain) style = meta_of(*call.inputs()[0].tensor).style();
    const auto sizes = result_sizes(call, decision, r, local);
    auto result = wrap(local, sizes, call.mesh(), decision.results[r], lost_base, {}, std::move(style));
    if (decision.pieces_differ || (decision.pieces_of_one && lies_as_input(call, decision))) {
      result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, agreed_strides(call, decision, r, sizes));
    }
    return result;
  }

  static c10::IValue wrapped(const OpCall& call, const Decision& decision, std::size_t r, c10::IValue value,
                             bool lost_base) {
    if (value.isTensor()) return wrap_result(call, decision, r, value.toTensor(), lost_base);
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& local : value.toTensorVector()) {
      tensors.push_back(wrap_result(call, decision, r, local, lost_base));
    }
    return tensors;
  }

  static bool writes_plain(const OpCall& call) {
    return std::ranges::any_of(call.inputs(), [](const Input& input) {
      return input.written && input.plain && !input.sizes.empty();
    });
  }

  // The operator cannot run on the pieces in their layout (Decision::by_copy).
  void run_otherwise(OpCall& call, Stack& stack) const {
    const auto& op = call.op();
    if (op.loops) return run_items(call, stack);
    if (op.functional && !writes_lists(op)) return run_and_store(call, stack);
    run_on_copies(call, stack);
  }

  static bool writes_lists(const Operator& op) {
    for (std::size_t a = 0; a < op.written.size(); ++a) {
      if (op.written[a] && op.arguments[a] == ArgumentKind::kTensors) return true;
    }
    return false;
  }

  // The operator's loop over its lists, which is the kernel of every device that has none of its own. It reads
  // tensors that are no lists as numbers.
  static void run_items(const OpCall& call, Stack& stack) {
    const auto& op = call.op();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto* whole = call.mesh()->layout(Placements(call.mesh()->ndim()));
    const auto base = stack.size() - op.arguments.size();
    for (const auto& input : call.inputs()) {
      const auto a = static_cast<std::size_t>(input.argument);
      if (op.arguments[a] != ArgumentKind::kTensor) continue;
      stack[base + a] = redistribute_local(input.local, input.sizes, *input.layout, *whole);
    }
    op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  // On the whole of every input; then each rank stores its pieces of those that were written.
  void run_on_copies(OpCall& call, Stack& stack) const {
    const auto* whole = call.mesh()->layout(Placements(call.mesh()->ndim()));
    const auto n_results = count_results(call.op());
    Decision everywhere;
    everywhere.inputs.assign(call.inputs().size(), whole);
    everywhere.results.assign(n_results, whole);
    everywhere.raw_results.assign(n_results, whole);
    everywhere.sources.resize(n_results);
    std::vector<at::Tensor> pieces;
    for (const auto& input : call.inputs()) pieces.push_back(input.local);
    run(call, everywhere, stack);
    const at::AutoDispatchBelowADInplaceOrView below;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto& input = call.inputs()[i];
      if (!input.written || input.layout == whole) continue;
      pieces[i].copy_(redistribute_local(input.local, input.sizes, *whole, *input.layout));
    }
  }

  // Operators that write where their result cannot be made: out=, in place on pieces of another layout, in
  // place with other sizes. The operator that returns its result instead, which is then stored in the written
  // arguments.
  static void run_and_store(OpCall& call, Stack& stack) {
    const auto& op = call.op();
    call.own_tensors();
    if (!op.functional || writes_lists(op)) {
      base::raise(
          ErrorKind::kUnsupported,
          base::cat(call.describe(),
                    ": cannot write its result here, and no operator returns it instead. Redistribute "
                    "the arguments to Replicate() first, or work on their to_local()"));
    }
    const auto base = stack.size() - op.arguments.size();
    std::vector<c10::IValue> written;
    for (std::size_t i = 0; i < op.written.size(); ++i) {
      if (op.written[i]) written.push_back(stack[base + i]);
    }
    // From the last one, so that the places before stay what they were.
    for (std::size_t i = op.written.size(); !op.in_place && i-- > 0;) {
      if (op.written[i]) stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(base + i));
    }
    op.functional->callBoxed(stack);
    const auto first = stack.size() - written.size();
    for (std::size_t w = 0; w < written.size(); ++w) {
      store(call, written[w], stack[first + w]);
      stack[first + w] = std::move(written[w]);
    }
  }

  static void store(const OpCall& call, const c10::IValue& target, const c10::IValue& value) {
    const auto into = target.toTensor();
    const auto source = value.toTensor();
    // Backward formulas write into zeros that they made from sizes alone, which are plain. Those become the
    // result, and so does a tensor that is given other sizes. Outside of them a plain tensor is a replica
    // (ImplicitReplicationScope) and stays one.
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    if (call.op().reshapes || (in_backward && !is_sharded(into))) {
      into.unsafeGetTensorImpl()->shallow_copy_from(source.getIntrusivePtr());
      return;
    }
    if (source.sizes() != into.sizes()) {
      base::raise(ErrorKind::kUsage, base::cat(call.describe(), ": the result has sizes ", source.sizes(),
                                               "; a sharded tensor cannot be resized"));
    }
    const auto& from = meta_of(source);
    const bool plain = !is_sharded(into);
    const auto* const layout =
        plain ? from.mesh()->layout(Placements(from.mesh()->ndim())) : meta_of(into).layout();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto& to = plain ? into : meta_of(into).local();
    to.copy_(redistribute_local(from.local(), source.sizes(), *from.layout(), *layout));
  }

  const c10::OperatorHandle handle_;
  std::once_flag once_;
  std::unique_ptr<const Operator> operator_;
  std::atomic<bool> noted_{false};
};

// Composite operators decompose by themselves where they meet the key: into operators that come here.
// rand_like, randn_like and randint_like take no generator, but are an empty_like and an operator that does.
bool decomposes(const c10::OperatorHandle& handle) {
  const auto& name = handle.operator_name();
  if (name.name.starts_with("aten::rand") && name.name.ends_with("_like") &&
      !name.overload_name.ends_with("out")) {
    return true;
  }
  return handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// Lives for ever; its registrations would otherwise be removed while tensors still need them.
class Installation final : public c10::OpRegistrationListener {
 public:
  void install_all() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (const auto handle = dispatcher.findSchema(name)) install(*handle);
    }
  }
  // Operators of libraries that are loaded later. The listener is also called for those that exist.
  void onOperatorRegistered(const c10::OperatorHandle& handle) override { install(handle); }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

 private:
  void install(const c10::OperatorHandle& handle) {
    if (decomposes(handle)) return;
    handles_.push_back(c10::Dispatcher::singleton().registerImpl(
        handle.operator_name(), kKey,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(handle)), std::nullopt, nullptr,
        "lockstep/dtensor"));
  }
  std::vector<c10::RegistrationHandleRAII> handles_;
};

}  // namespace

bool set_loss_parallel(bool on) noexcept {
  return std::exchange(losses_stay_sharded, on);
}

c10::IValue* LocalCall::arguments() const {
  return &stack[stack.size() - call.op().arguments.size()];
}
void LocalCall::run() const {
  call.op().handle.callBoxed(stack);
}

void install_kernels() {
  static std::once_flag once;
  // Never undone: tensors may live as long as the process.
  std::call_once(once, [] {
    (new Installation)->install_all();
    install_sharded_tensors();
  });
}

}  // namespace lockstep::dtensor_internal
