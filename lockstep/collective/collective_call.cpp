#include "lockstep/collective/internal/collective_call.h"
#include "lockstep/collective/record_comm.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/group/detail/call_report.h"
#include "lockstep/group/detail/work_state.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

// The types that an engine can reduce. All others (complex aside, which callers turn into their real type
// first) can only be moved, as bytes: wire_for_move().
std::optional<lockstep_dtype> engine_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return LOCKSTEP_U8;
    case at::kChar:
      return LOCKSTEP_I8;
    case at::kShort:
      return LOCKSTEP_I16;
    case at::kInt:
      return LOCKSTEP_I32;
    case at::kLong:
      return LOCKSTEP_I64;
    case at::kHalf:
      return LOCKSTEP_F16;
    case at::kBFloat16:
      return LOCKSTEP_BF16;
    case at::kFloat:
      return LOCKSTEP_F32;
    case at::kDouble:
      return LOCKSTEP_F64;
    case at::kBool:
      return LOCKSTEP_BOOL;
    default:
      return std::nullopt;
  }
}

bool is_bitwise(ReduceOp::Kind op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

}  // namespace

// Marked as asynchronous, as torch's are: another thread may end it.
std::shared_ptr<at::RecordFunction> CollectiveCall::begin_event() const {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks.has_value()) [[likely]]
    return nullptr;
  auto event = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  event->_setAsync();
  // Callbacks see the inputs while the event begins only, so the list may go.
  std::vector<c10::IValue> inputs;
  for (const auto& tensor : request_.described) inputs.emplace_back(tensor);
  const std::string* const name = comm_name();
  event->before(name != nullptr ? *name : base::cat("lockstep:", request_.name),
                c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  return event;
}

void CollectiveCall::report(const Failure& failure) const {
  report_call(
      {.function = request_.name, .where = request_.where, .group = group_.get(), .failure = &failure});
}

// Only for engines that take the device's memory: a back end of the program's own may serve a device type
// without knowing of streams.
void CollectiveCall::bind_stream() {
  if (!device_ || !device_->is_cuda()) return;
  const comm::Engine* const engine = part().engine();
  if (engine != nullptr && !engine->takes(LOCKSTEP_CUDA)) return;
  request_.stream = current_stream(*device_);
  const auto bind = [&](lockstep_op& op) {
    op.device_kind = LOCKSTEP_CUDA;
    op.device = device_->index();
    op.stream = request_.stream->native_handle();
  };
  bind(request_.op);
  for (auto& op : request_.more) bind(op);
  if (request_.more.empty()) return;
  request_.op.flags |= LOCKSTEP_OP_MORE_FOLLOW;
  for (std::size_t i = 0; i + 1 < request_.more.size(); ++i)
    request_.more[i].flags |= LOCKSTEP_OP_MORE_FOLLOW;
}

// Blocks until the operation is over, so its buffers need no owner beyond the caller's frame. On device memory
// the stream is ordered instead: buffers that are freed now are not used by others before it has passed.
void CollectiveCall::run() {
  count_operation(request_.ended.type);
  bind_stream();
  try {
    part().run(request_);
  } catch (const Error& error) {
    report(error.failure());
    throw;
  }
}

// From part().post() on the Work's state owns `held`: the engine may still use the buffers after the caller
// has dropped its Work. The event goes with them and ends with the operation, perhaps on another thread.
Work CollectiveCall::post(HeldTensors held) {
  count_operation(request_.ended.type);
  bind_stream();
  held.event = begin_event();
  try {
    auto work = part().post(request_, std::move(held));
    // A call of several ops can only be posted, so a synchronous one waits here.
    if (!async_) work.wait();
    return work;
  } catch (const Error& error) {
    report(error.failure());
    throw;
  }
}

bool is_plain(const at::Tensor& tensor) {
  // The conjugate and negative bits are pending changes to the values: memory holds the values without them,
  // which the engine would send.
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device()));
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  // Otherwise copy_ would record a node, and the copy would keep the caller's graph alive as long as the
  // operation.
  const at::NoGradGuard no_grad;
  auto copy = plain_like(tensor);
  copy.copy_(tensor);
  return copy;
}

at::Tensor plain(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : plain_copy(tensor);
}

bool overlaps_itself(const at::Tensor& tensor) {
  // Only Yes counts: of strided views torch often answers TooHard, although their elements are apart.
  return !tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

bool may_share_memory(const at::Tensor& a, const at::Tensor& b) {
  // For tensors with gaps torch gives no answer, although most have a storage of their own.
  if (a.has_storage() && b.has_storage()) {
    const auto* const at_a = static_cast<const char*>(a.storage().data());
    const auto* const at_b = static_cast<const char*>(b.storage().data());
    const std::less_equal<const char*> before;
    if (before(at_a + a.storage().nbytes(), at_b) || before(at_b + b.storage().nbytes(), at_a)) return false;
  }
  return at::get_overlap_status(a, b) != at::MemOverlapStatus::No;
}

std::vector<std::int64_t> real_sizes(const at::Tensor& tensor) {
  auto sizes = tensor.sizes().vec();
  if (tensor.is_complex()) sizes.push_back(2);
  return sizes;
}

int find_root(const GroupBase& group, RootArgument argument, std::string& why) {
  const auto& [in_world, in_group, role, fallback] = argument;
  const int size = group.size();
  if (in_world && in_group) {
    why = base::cat(role, " and group_", role, " are both given; give one of them");
    return -1;
  }
  if (in_group) {
    if (*in_group >= 0 && *in_group < size) return *in_group;
    why = base::cat("group_", role, " is ", *in_group, ", ranks of this group are 0 to ", size - 1);
    return -1;
  }
  const auto chosen = in_world ? in_world : fallback;
  if (!chosen) {
    why = base::cat("neither ", role, " nor group_", role, " is given; give one of them");
    return -1;
  }
  if (const int rank_here = group.group_rank_of(*chosen); rank_here >= 0) return rank_here;
  const auto& ranks = group.ranks();
  why = base::cat(role, " is ", *chosen, ", ");
  if (ranks.back() == size - 1) {
    why += base::cat("ranks of this group are 0 to ", size - 1);
  } else {
    why += base::cat("the members of this group have the ranks ", c10::Join(", ", ranks),
                     " in the world; use group_", role, " for ranks in the group");
  }
  return -1;
}

std::string CollectiveCall::prefix() const {
  char where[kWhereCapacity];
  write_where(request_.where, where);
  return base::cat(request_.name, " of group \"", group_->name(), "\" (rank ", rank(), " of ", size(),
                   ", called at ", where, "): ");
}

void CollectiveCall::check(const at::Tensor& tensor, const char* role) {
  if (!tensor.defined()) refuse(ErrorKind::kUsage, role, " is an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    refuse(ErrorKind::kUnsupported, role, " is sparse; only dense tensors can be sent");
  }
  // The first checked tensor decides which part of the group serves the call; describe(), the wires and
  // offers() depend on it, so every entry point checks its tensors before it uses them.
  GroupBase* const part = group_->for_device(tensor.device().type());
  if (part == nullptr) {
    refuse(ErrorKind::kUnsupported, role, " is on ", tensor.device().str(), "; the group works on ",
           group_->backend_config());
  }
  if (device_ && *device_ != tensor.device()) {
    refuse(ErrorKind::kUsage, role, " is on ", tensor.device().str(), ", another tensor of the call on ",
           device_->str(), "; all must be on one device");
  }
  part_ = part;
  device_ = tensor.device();
  if (tensor.is_quantized()) {
    refuse(ErrorKind::kUnsupported, role, " is quantized (", c10::toString(tensor.scalar_type()),
           "); send its int_repr()");
  }
}

void CollectiveCall::check_output(const at::Tensor& tensor, const char* role) {
  check(tensor, role);
  if (overlaps_itself(tensor)) {
    refuse(ErrorKind::kUsage, role, " has elements that share memory (an expanded view?); clone() it first");
  }
}

void CollectiveCall::check_same_type(const at::Tensor& tensor, const char* role,
                                     const at::Tensor& other) const {
  if (c10::toRealValueType(tensor.scalar_type()) != c10::toRealValueType(other.scalar_type())) {
    refuse(ErrorKind::kUsage, role, " is ", c10::toString(tensor.scalar_type()), " and the input ",
           c10::toString(other.scalar_type()), "; they must have one type");
  }
}

void CollectiveCall::check_apart(const at::Tensor& a, const char* role_a, const at::Tensor& b,
                                 const char* role_b) const {
  // The opposite choice to may_share_memory(): there an unknown overlap costs a copy, here it would refuse a
  // correct call.
  const auto status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial) return;
  refuse(ErrorKind::kUsage, role_a, " and ", role_b, " share memory; each result needs its own");
}

void CollectiveCall::check_list(const std::vector<at::Tensor>& list, const char* role,
                                const at::Tensor& other, bool written) {
  if (list.size() != static_cast<std::size_t>(size())) {
    refuse(ErrorKind::kUsage, role, " has ", list.size(), " tensors, the group ", size(),
           " ranks; one each is needed");
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (written) {
      // Quadratic in the ranks, but cheap per pair. Results that overlap would overwrite each other.
      check_output(list[i], role);
      for (std::size_t j = 0; j < i; ++j) check_apart(list[i], role, list[j], "another of them");
    } else {
      check(list[i], role);
    }
    check_same_type(list[i], role, other);
    if (list[i].scalar_type() != list[0].scalar_type()) refuse(ErrorKind::kUsage, role, " mixes types");
  }
}

int CollectiveCall::root(std::optional<int> in_world, std::optional<int> in_group, const char* role,
                         std::optional<int> fallback) const {
  std::string why;
  const int found = find_root(*group_, {in_world, in_group, role, fallback}, why);
  if (found < 0) refuse(ErrorKind::kUsage, why);
  return found;
}

void CollectiveCall::warn_not_member() const {
  // Process-wide: rank threads that run the same line log it once together. The set grows by one entry per
  // line of the program.
  static std::mutex mutex;
  static std::set<std::string> told;  // guarded by mutex
  char where[kWhereCapacity];
  write_where(request_.where, where);
  const auto line = base::cat(request_.name, " (called at ", where,
                              "): this rank is not a member of the group; nothing was done");
  const std::lock_guard lock(mutex);
  if (told.insert(line).second) base::log(LogLevel::kWarn, line);
}

void CollectiveCall::refuse_inside_batch() const {
  if (batch() == nullptr) return;
  refuse(ErrorKind::kUsage,
         "a CoalescingScope collects on this group; only all_reduce, all_gather_into_tensor and "
         "reduce_scatter_tensor may be called inside it");
}

// The words of base::checked_timeout, but counted and reported as every refusal is.
void CollectiveCall::refuse_timeout() const {
  refuse(ErrorKind::kUsage, "a timeout of ", request_.timeout->count(),
         " ms; it must be positive, kNoTimeout waits forever");
}

Wire CollectiveCall::wire_for_reduce(at::ScalarType type, const ReduceOp& op) const {
  const ReduceOp::Kind kind = op.kind();
  if (kind < 0 || kind > ReduceOp::kPremulSum)
    refuse(ErrorKind::kUsage, "there is no reduce operation ", static_cast<int>(kind));
  const bool complex = c10::isComplexType(type);
  const bool sums = kind == ReduceOp::kSum || kind == ReduceOp::kPremulSum;
  if (complex && !sums && kind != ReduceOp::kAvg) {
    refuse(ErrorKind::kUsage, name_of(kind), " is not defined for complex tensors (", c10::toString(type),
           "); SUM and AVG are");
  }
  if (kind == ReduceOp::kAvg && c10::isIntegralType(type, true)) {
    refuse(ErrorKind::kUsage, "AVG needs a floating type, the tensor is ", c10::toString(type),
           "; use SUM and divide");
  }
  if (is_bitwise(kind) && !c10::isIntegralType(type, true)) {
    refuse(ErrorKind::kUsage, name_of(kind), " needs an integer type, the tensor is ", c10::toString(type));
  }
  if (kind == ReduceOp::kPremulSum) check_factor(type, op);
  // A sum of complex numbers is the sum of their parts: the engine sees twice as many reals. That is why only
  // SUM, AVG and PREMUL_SUM by a factor applied here pass the check above.
  const auto dtype = engine_dtype(c10::toRealValueType(type));
  const comm::Engine* engine = part().engine();
  if (!dtype) refuse(ErrorKind::kUnsupported, c10::toString(type), " tensors cannot be reduced, only moved");
  const auto number = static_cast<lockstep_reduce_op>(sums ? ReduceOp::kSum : kind);
  // Null: a group of one, which does every operation itself.
  if (engine != nullptr && !engine->reduces(*dtype, number)) {
    refuse(ErrorKind::kUnsupported, "engine ", engine->name(), " does not reduce ", c10::toString(type),
           " with ", name_of(kind));
  }
  return {*dtype, complex ? 2 : 1};
}

void CollectiveCall::check_factor(at::ScalarType type, const ReduceOp& op) const {
  const auto& factor = op.factor();
  if (!factor.defined())
    refuse(ErrorKind::kUsage, "PREMUL_SUM has no factor; use ReduceOp::premul_sum(factor)");
  if (factor.numel() != 1) {
    refuse(ErrorKind::kUsage, "the factor of PREMUL_SUM has sizes ", factor.sizes(),
           "; a number or a tensor of one element is needed");
  }
  if (!c10::canCast(factor.scalar_type(), type)) {
    refuse(ErrorKind::kUsage, "the factor of PREMUL_SUM is ", c10::toString(factor.scalar_type()),
           " and the tensor ", c10::toString(type), ", which cannot hold the product");
  }
}

void CollectiveCall::set_reduce(const ReduceOp& op) {
  // Engines have no PREMUL_SUM: each rank multiplies its input before it is sent (scaled()), and the engine
  // sums.
  const auto kind = op.kind() == ReduceOp::kPremulSum ? ReduceOp::kSum : op.kind();
  request_.op.reduce = static_cast<lockstep_reduce_op>(kind);
}

at::Tensor CollectiveCall::scaled(const at::Tensor& tensor, const ReduceOp& op) const {
  if (op.kind() != ReduceOp::kPremulSum) return tensor;
  const at::NoGradGuard no_grad;
  auto product = plain_like(tensor);
  // A factor without dimensions does not widen the product.
  at::mul_out(product, tensor, op.factor().reshape({}));
  return product;
}

Wire CollectiveCall::wire_for_move(at::ScalarType type) const {
  const auto dtype = engine_dtype(c10::toRealValueType(type));
  const comm::Engine* engine = part().engine();
  if (dtype && (engine == nullptr || engine->moves(*dtype)))
    return {*dtype, c10::isComplexType(type) ? 2 : 1};
  return {LOCKSTEP_U8, static_cast<std::int64_t>(c10::elementSize(type))};
}

void CollectiveCall::describe(at::TensorList tensors, bool shapes_may_differ) {
  // Appending copies tensor handles; nothing reads them unless the debug wrapper or a profiler is active.
  if (!part().checks_calls() && !at::hasCallbacks()) [[likely]]
    return;
  request_.described.insert(request_.described.end(), tensors.begin(), tensors.end());
  request_.shapes_may_differ = request_.shapes_may_differ || shapes_may_differ;
}

bool CollectiveCall::offers(lockstep_op_kind kind) const {
  const comm::Engine* engine = part().engine();
  return engine == nullptr || engine->offers(kind);
}

bool CollectiveCall::takes_rows() const {
  const comm::Engine* engine = part().engine();
  return engine != nullptr && engine->capabilities().takes_rows != 0;
}

void CollectiveCall::check_offered(lockstep_op_kind kind) const {
  if (!offers(kind)) [[unlikely]]
    refuse(ErrorKind::kUnsupported, "engine ", part().engine()->name(), " does not offer it");
}

Work CollectiveCall::start_in_place(at::Tensor tensor, Wire wire) {
  check_offered(request_.op.kind);
  lockstep_op& op = request_.op;
  op.dtype = wire.dtype;
  op.count = static_cast<std::uint64_t>(tensor.numel() * wire.units);
  if (is_plain(tensor)) {
    op.send = op.recv = tensor.mutable_data_ptr();
    // The common case, without HeldTensors: the result travels inside the Work itself, which then has no
    // State.
    if (!async_) {
      const auto event = begin_event();
      run();
      return Work(std::move(tensor), request_.ended);
    }
    return launch({.buffers = {tensor}, .results = {tensor}});
  }
  // The copy into the caller's tensor happens after the operation, so a failed one leaves that tensor as it
  // was.
  const auto temporary = plain(tensor);
  op.send = op.recv = temporary.mutable_data_ptr();
  return launch({.buffers = {temporary}, .results = {tensor}, .copies = {{tensor, temporary}}});
}

Work CollectiveCall::start(const at::Tensor& send, const at::Tensor& recv, std::int64_t count, Wire wire,
                           HeldTensors held) {
  check_offered(request_.op.kind);
  lockstep_op& op = request_.op;
  op.dtype = wire.dtype;
  op.count = static_cast<std::uint64_t>(count * wire.units);
  if (send.defined()) {
    op.send = send.const_data_ptr();
    held.buffers.push_back(send);
  }
  if (recv.defined()) {
    op.recv = recv.mutable_data_ptr();
    held.buffers.push_back(recv);
  }
  return launch(std::move(held));
}

Work CollectiveCall::start_all(std::vector<lockstep_op> ops, HeldTensors held) {
  // Before any of them is posted: a call of which half was posted would leave the other ranks waiting for the
  // rest.
  for (const auto& op : ops) check_offered(op.kind);
  request_.op = ops.front();
  if (ops.size() == 1) return launch(std::move(held));
  request_.more.assign(ops.begin() + 1, ops.end());
  return post(std::move(held));
}

Work CollectiveCall::start_barrier() {
  request_.op.kind = LOCKSTEP_BARRIER;
  check_offered(LOCKSTEP_BARRIER);
  return launch({});
}

Work CollectiveCall::launch(HeldTensors held) {
  if (async_) return post(std::move(held));
  const auto event = begin_event();
  run();
  try {
    // The operation itself has succeeded: only this rank fails here, and the group stays usable.
    held.copy_back();
  } catch (const Error& error) {
    Failure failure = error.failure();
    failure.message = prefix() + failure.message;
    report(failure);
    base::raise(std::move(failure));
  }
  if (held.results.empty()) return Work(at::Tensor(), request_.ended);
  if (held.results.size() == 1) return Work(std::move(held.results.front()), request_.ended);
  return Work(std::make_shared<Work::State>(request_.ended, std::move(held.results)));
}

}  // namespace lockstep::internal
