#include "engines/cuda_ipc/operation.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::cuda_ipc {
namespace {

constexpr const char* kKinds[] = {"barrier",      "broadcast", "all_reduce", "all_gather", "reduce_scatter",
                                  "reduce",       "gather",    "scatter",    "all_to_all", "all_to_all_v",
                                  "all_gather_v", "send",      "recv"};
constexpr const char* kDtypes[] = {"u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"};
constexpr const char* kReduces[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
static_assert(std::size(kKinds) == LOCKSTEP_OP_KINDS && std::size(kDtypes) == LOCKSTEP_DTYPES &&
              std::size(kReduces) == LOCKSTEP_REDUCE_OPS);

// Numbers that another rank wrote are cut to what has a name.
template <std::size_t N>
const char* name_of(const char* const (&names)[N], std::uint64_t index) {
  return names[std::min<std::uint64_t>(index, N - 1)];
}

template <std::size_t N>
std::string at(const char (&where)[N]) {
  const std::string text(where, ::strnlen(where, N));
  return text.empty() ? "" : " at " + text;
}

}  // namespace

Operation::Operation(const lockstep_op& from, int size)
    : op(from),
      where(from.where != nullptr ? from.where : ""),
      deadline(Deadline::from_monotonic_ns(from.deadline_ns)) {
  op.where = where.c_str();
  if (op.kind == LOCKSTEP_ALL_TO_ALL_V) {
    send_counts.assign(from.send_counts, from.send_counts + size);
    op.send_counts = send_counts.data();
  }
  if (comm::is_uneven(op.kind)) {
    recv_counts.assign(from.recv_counts, from.recv_counts + size);
    op.recv_counts = recv_counts.data();
  }
}

// After a failure a stream may still copy into a stage: nobody gets that memory any more.
Operation::~Operation() {
  if (status != LOCKSTEP_OK) return;
  for (const Stage& stage : {staged_send, staged_recv}) {
    if (stage.memory != nullptr) stage.device->free(stage.memory);
  }
}

std::uint64_t Operation::send_bytes() const {
  return extent.send * comm::size_of(op.dtype);
}
std::uint64_t Operation::recv_bytes() const {
  return extent.recv * comm::size_of(op.dtype);
}

std::string describe(const lockstep_op& op) {
  std::string text = base::cat(name_of(kKinds, op.kind), "(");
  if (op.kind == LOCKSTEP_BARRIER) return text + ")";
  if (comm::has_reduce(op.kind)) text += base::cat(name_of(kReduces, op.reduce), ", ");
  text += name_of(kDtypes, op.dtype);
  text += op.kind == LOCKSTEP_ALL_TO_ALL_V ? ", counts per peer" : base::cat(", ", op.count, " elements");
  if (comm::has_root(op.kind)) text += base::cat(", root ", op.root);
  if (op.kind == LOCKSTEP_SEND) text += base::cat(", to rank ", op.root, ", tag ", op.tag);
  if (op.kind == LOCKSTEP_RECV)
    text += base::cat(", from ", op.root < 0 ? "any rank" : base::cat("rank ", op.root), ", tag ", op.tag);
  text += ")";
  return op.where == nullptr || *op.where == '\0' ? text : base::cat(text, " at ", op.where);
}

std::string describe(const Call& call) {
  lockstep_op op{};
  op.kind = static_cast<lockstep_op_kind>(call.kind);
  op.dtype = static_cast<lockstep_dtype>(call.dtype);
  op.reduce = static_cast<lockstep_reduce_op>(call.reduce);
  op.root = call.root;
  op.count = call.count;
  return base::cat(describe(op), " #", call.tag, at(call.where));
}

std::string describe(const Message& message) {
  lockstep_op op{};
  op.kind = LOCKSTEP_SEND;
  op.dtype = static_cast<lockstep_dtype>(message.dtype);
  op.root = message.to;
  op.tag = message.tag;
  op.count = message.count;
  return describe(op) + at(message.where);
}

Failure current_failure() noexcept {
  try {
    throw;
  } catch (const cuda::Error& error) {
    return {error.result() == cuda::kOutOfMemory ? ErrorKind::kResource : ErrorKind::kSystem, error.what(),
            ErrorFamily::kBackend, std::nullopt};
  } catch (...) {
    return base::current_failure();
  }
}

}  // namespace lockstep::cuda_ipc
