#include "engines/nccl/operation.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;

const char* name_of(lockstep_op_kind kind) {
  constexpr const char* kNames[] = {"barrier",      "broadcast", "all_reduce", "all_gather", "reduce_scatter",
                                    "reduce",       "gather",    "scatter",    "all_to_all", "all_to_all_v",
                                    "all_gather_v", "send",      "recv"};
  static_assert(std::size(kNames) == LOCKSTEP_OP_KINDS);
  return kind >= 0 && kind < LOCKSTEP_OP_KINDS ? kNames[kind] : "unknown";
}

const char* name_of(lockstep_dtype dtype) {
  constexpr const char* kNames[] = {"u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"};
  static_assert(std::size(kNames) == LOCKSTEP_DTYPES);
  return dtype >= 0 && dtype < LOCKSTEP_DTYPES ? kNames[dtype] : "unknown";
}

const char* name_of(lockstep_reduce_op op) {
  constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  static_assert(std::size(kNames) == LOCKSTEP_REDUCE_OPS);
  return op >= 0 && op < LOCKSTEP_REDUCE_OPS ? kNames[op] : "unknown";
}

}  // namespace

std::string text_of_message(bool is_send, int dtype, std::uint64_t count, int tag) {
  return cat(is_send ? "send" : "recv", "(", name_of(static_cast<lockstep_dtype>(dtype)), ", ", count,
             " elements, tag ", tag, ")");
}

std::string text_of(const Operation& operation) {
  const lockstep_op& op = operation.op;
  std::string text;
  if (comm::is_point_to_point(op.kind)) {
    text = text_of_message(op.kind == LOCKSTEP_SEND, op.dtype, op.count, op.tag);
  } else {
    text = cat(name_of(op.kind), "(");
    if (op.kind != LOCKSTEP_BARRIER) {
      if (comm::has_reduce(op.kind)) text += cat(name_of(op.reduce), ", ");
      text += name_of(op.dtype);
      if (!comm::is_uneven(op.kind)) text += cat(", ", op.count, " elements");
      if (comm::has_root(op.kind)) text += cat(", root ", op.root);
    }
    text += cat(") #", operation.sequence);
  }
  return operation.where.empty() ? text : cat(text, " at ", operation.where);
}

}  // namespace lockstep::nccl_plugin
