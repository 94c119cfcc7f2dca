#include "lockstep/group/internal/call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "lockstep/group/internal/work_state.h"

namespace lockstep::internal {
namespace {

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

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

}  // namespace

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kAvg:
      return "AVG";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBxor:
      return "BXOR";
  }
  return "unknown";
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor plain(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  const at::NoGradGuard no_grad;
  auto copy = plain_like(tensor);
  copy.copy_(tensor);
  return copy;
}

std::vector<std::int64_t> real_sizes(const at::Tensor& tensor) {
  auto sizes = tensor.sizes().vec();
  if (tensor.is_complex()) sizes.push_back(2);
  return sizes;
}

std::string Call::prefix() const {
  char where[kWhereCapacity];
  write_where(request_.where, where);
  return cat(request_.name, " of group \"", group_->name(), "\" (rank ", rank(), " of ", size(),
             ", called at ", where, "): ");
}

void Call::check(const at::Tensor& tensor, const char* role) const {
  if (!tensor.defined()) refuse(ErrorKind::kUsage, role, " is not a tensor (undefined)");
  if (tensor.layout() != at::kStrided) {
    refuse(ErrorKind::kUnsupported, role, " is sparse; only dense tensors can be sent");
  }
  if (!tensor.device().is_cpu()) {
    refuse(ErrorKind::kUnsupported, role, " is on ", tensor.device().str(), "; engine ", group_->backend(),
           " works on CPU tensors");
  }
  if (tensor.is_quantized()) {
    refuse(ErrorKind::kUnsupported, role, " is quantized (", c10::toString(tensor.scalar_type()),
           "); send its int_repr()");
  }
}

void Call::check_output(const at::Tensor& tensor, const char* role) const {
  check(tensor, role);
  if (!tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(ErrorKind::kUsage, role, " has elements that share memory (an expanded view?); clone() it first");
  }
}

void Call::check_same_type(const at::Tensor& tensor, const char* role, const at::Tensor& other) const {
  if (c10::toRealValueType(tensor.scalar_type()) != c10::toRealValueType(other.scalar_type())) {
    refuse(ErrorKind::kUsage, role, " is ", c10::toString(tensor.scalar_type()), " and the input ",
           c10::toString(other.scalar_type()), "; they must have one type");
  }
}

bool Call::check_apart(const at::Tensor& a, const char* role_a, const at::Tensor& b,
                       const char* role_b) const {
  const auto status = at::get_overlap_status(a, b);
  if (status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial) {
    refuse(ErrorKind::kUsage, role_a, " and ", role_b, " share memory; clone() one of them first");
  }
  return status == at::MemOverlapStatus::TooHard;
}

void Call::check_root(int root, const char* role) const {
  if (root < 0 || root >= size()) {
    refuse(ErrorKind::kUsage, role, " is ", root, ", ranks of this group are 0 to ", size() - 1);
  }
}

Wire Call::wire_for_reduce(at::ScalarType type, ReduceOp op) const {
  const int number = static_cast<int>(op);
  if (number < 0 || number >= LOCKSTEP_REDUCE_OPS)
    refuse(ErrorKind::kUsage, "there is no reduce operation ", number);
  const bool complex = c10::isComplexType(type);
  if (complex && op != ReduceOp::kSum && op != ReduceOp::kAvg) {
    refuse(ErrorKind::kUsage, name_of(op), " is not defined for complex tensors (", c10::toString(type),
           "); SUM and AVG are");
  }
  if (op == ReduceOp::kAvg && c10::isIntegralType(type, true)) {
    refuse(ErrorKind::kUsage, "AVG needs a floating type, the tensor is ", c10::toString(type),
           "; use SUM and divide");
  }
  if (is_bitwise(op) && !c10::isIntegralType(type, true)) {
    refuse(ErrorKind::kUsage, name_of(op), " needs an integer type, the tensor is ", c10::toString(type));
  }
  const auto dtype = engine_dtype(c10::toRealValueType(type));
  const comm::Engine* engine = group_->engine();
  if (!dtype) refuse(ErrorKind::kUnsupported, c10::toString(type), " tensors cannot be reduced, only moved");
  if (engine != nullptr && !engine->reduces(*dtype, static_cast<lockstep_reduce_op>(number))) {
    refuse(ErrorKind::kUnsupported, "engine ", engine->name(), " does not reduce ", c10::toString(type),
           " with ", name_of(op));
  }
  return {*dtype, complex ? 2 : 1};
}

Wire Call::wire_for_move(at::ScalarType type) const {
  const auto dtype = engine_dtype(c10::toRealValueType(type));
  const comm::Engine* engine = group_->engine();
  if (dtype && (engine == nullptr || engine->moves(*dtype)))
    return {*dtype, c10::isComplexType(type) ? 2 : 1};
  return {LOCKSTEP_U8, static_cast<std::int64_t>(c10::elementSize(type))};
}

void Call::check_offered() const {
  const comm::Engine* engine = group_->engine();
  if (engine != nullptr && !engine->offers(request_.op.kind)) {
    refuse(ErrorKind::kUnsupported, "engine ", engine->name(), " does not offer it");
  }
}

Work Call::start_in_place(at::Tensor tensor, Wire wire) {
  check_offered();
  lockstep_op& op = request_.op;
  op.dtype = wire.dtype;
  op.count = static_cast<std::uint64_t>(tensor.numel() * wire.units);
  if (is_plain(tensor)) {
    op.send = op.recv = tensor.mutable_data_ptr();
    if (!async_) {
      const std::uint64_t sequence = group_->run(request_);
      return Work(std::move(tensor), sequence);
    }
    return group_->post(request_, {.buffers = {tensor}, .results = {tensor}, .copies = {}});
  }
  const auto temporary = plain(tensor);
  op.send = op.recv = temporary.mutable_data_ptr();
  return launch({.buffers = {temporary}, .results = {tensor}, .copies = {{tensor, temporary}}});
}

Work Call::start(const at::Tensor& send, const at::Tensor& recv, std::int64_t count, Wire wire, Held held) {
  check_offered();
  lockstep_op& op = request_.op;
  op.dtype = wire.dtype;
  op.count = static_cast<std::uint64_t>(count * wire.units);
  op.send = send.const_data_ptr();
  op.recv = recv.mutable_data_ptr();
  held.buffers.push_back(send);
  held.buffers.push_back(recv);
  return launch(std::move(held));
}

Work Call::start_barrier() {
  request_.op.kind = LOCKSTEP_BARRIER;
  check_offered();
  if (async_) return group_->post(request_, {});
  return Work(at::Tensor(), group_->run(request_));
}

Work Call::launch(Held held) {
  if (async_) return group_->post(request_, std::move(held));
  const std::uint64_t sequence = group_->run(request_);
  held.copy_back();
  if (held.results.size() == 1) return Work(std::move(held.results.front()), sequence);
  return Work(std::make_shared<Work::State>(sequence, std::move(held.results)));
}

}  // namespace lockstep::internal
