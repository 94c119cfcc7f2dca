#include "lockstep/engine/op_check.h"

#include <optional>

namespace lockstep::comm {
namespace {

std::optional<std::uint64_t> sum_of(const std::uint64_t* counts, int n) {
  std::uint64_t sum = 0;
  for (int i = 0; i < n; ++i) {
    if (counts[i] >= kMaxElements || (sum += counts[i]) >= kMaxElements) return std::nullopt;
  }
  return sum;
}

const char* wrong_with_counts(const lockstep_op& op, int rank, int size) {
  const bool all_to_all = op.kind == LOCKSTEP_ALL_TO_ALL_V;
  if (op.recv_counts == nullptr || (all_to_all && op.send_counts == nullptr)) return "the counts are missing";
  const auto received = sum_of(op.recv_counts, size);
  const auto sent = all_to_all ? sum_of(op.send_counts, size) : op.recv_counts[rank];
  if (!received || !sent) return "too many elements";
  if (all_to_all && op.send_counts[rank] != op.recv_counts[rank])
    return "the rank sends itself another number of elements than it receives from itself";
  if ((*sent > 0 && op.send == nullptr) || (*received > 0 && op.recv == nullptr)) return "a buffer is null";
  return nullptr;
}

bool needs_send(const lockstep_op& op, int rank) {
  return op.kind != LOCKSTEP_RECV && (op.kind != LOCKSTEP_SCATTER || rank == op.root);
}
bool needs_recv(const lockstep_op& op, int rank) {
  const bool at_root = op.kind == LOCKSTEP_REDUCE || op.kind == LOCKSTEP_GATHER;
  return op.kind != LOCKSTEP_SEND && (!at_root || rank == op.root);
}

}  // namespace

std::size_t size_of(lockstep_dtype dtype) {
  switch (dtype) {
    case LOCKSTEP_U8:
    case LOCKSTEP_I8:
    case LOCKSTEP_BOOL:
      return 1;
    case LOCKSTEP_I16:
    case LOCKSTEP_F16:
    case LOCKSTEP_BF16:
      return 2;
    case LOCKSTEP_I32:
    case LOCKSTEP_F32:
      return 4;
    case LOCKSTEP_I64:
    case LOCKSTEP_F64:
      return 8;
    default:
      return 0;
  }
}

const char* wrong_with(const lockstep_op& op, int rank, int size, const lockstep_capabilities& capabilities) {
  if (op.struct_size < sizeof(lockstep_op)) return "the operation's struct_size is too small";
  if (op.kind < 0 || op.kind >= LOCKSTEP_OP_KINDS) return "unknown operation";
  if ((capabilities.op_kinds >> op.kind & 1u) == 0) return "the engine does not offer this operation";
  if (op.kind == LOCKSTEP_BARRIER) return nullptr;
  if (op.dtype < 0 || op.dtype >= LOCKSTEP_DTYPES) return "unknown element type";
  if ((capabilities.dtypes >> op.dtype & 1u) == 0) return "the engine does not move this element type";
  if (op.kind == LOCKSTEP_ALL_TO_ALL_V || op.kind == LOCKSTEP_ALL_GATHER_V)
    return wrong_with_counts(op, rank, size);
  if (op.count >= kMaxElements / static_cast<std::uint64_t>(size)) return "too many elements";
  const bool reduces =
      op.kind == LOCKSTEP_ALL_REDUCE || op.kind == LOCKSTEP_REDUCE_SCATTER || op.kind == LOCKSTEP_REDUCE;
  if (reduces && (op.reduce < 0 || op.reduce >= LOCKSTEP_REDUCE_OPS)) return "unknown reduction";
  if (reduces && (capabilities.reduce[op.dtype] >> op.reduce & 1u) == 0)
    return "this element type cannot be reduced with this operation";
  const bool letter = op.kind == LOCKSTEP_SEND || op.kind == LOCKSTEP_RECV;
  if (letter && op.tag < 0) return "the tag is negative";
  if (letter && (op.root >= size || op.root < (op.kind == LOCKSTEP_RECV ? -1 : 0)))
    return "the peer is not a rank of the group";
  const bool rooted = op.kind == LOCKSTEP_BROADCAST || op.kind == LOCKSTEP_REDUCE ||
                      op.kind == LOCKSTEP_GATHER || op.kind == LOCKSTEP_SCATTER;
  if (rooted && (op.root < 0 || op.root >= size)) return "the root is not a rank of the group";
  const bool lacks =
      (needs_send(op, rank) && op.send == nullptr) || (needs_recv(op, rank) && op.recv == nullptr);
  return op.count > 0 && lacks ? "a buffer is null" : nullptr;
}

}  // namespace lockstep::comm
