#include "lockstep/host/internal/describe.h"

#include <fmt/core.h>

#include <algorithm>

namespace lockstep::comm::internal {
namespace {

constexpr const char* kKinds[] = {"barrier",      "broadcast", "all_reduce", "all_gather", "reduce_scatter",
                                  "reduce",       "gather",    "scatter",    "all_to_all", "all_to_all_v",
                                  "all_gather_v", "send",      "recv"};
constexpr const char* kDtypes[] = {"u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"};
constexpr const char* kReduces[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
static_assert(std::size(kKinds) == LOCKSTEP_OP_KINDS && std::size(kDtypes) == LOCKSTEP_DTYPES &&
              std::size(kReduces) == LOCKSTEP_REDUCE_OPS);

}  // namespace

std::string describe_call(std::uint64_t fingerprint) {
  // A peer wrote the word: never index by it unchecked.
  const auto kind = std::min<std::uint64_t>(fingerprint >> 60, LOCKSTEP_OP_KINDS - 1);
  const auto dtype = std::min<std::uint64_t>(fingerprint >> 56 & 15, LOCKSTEP_DTYPES - 1);
  const auto reduce = std::min<std::uint64_t>(fingerprint >> 52 & 15, LOCKSTEP_REDUCE_OPS - 1);
  const auto root = fingerprint >> 40 & 0xFF;
  const auto count = fingerprint & (kMaxCount - 1);
  std::string text = fmt::format("{}(", kKinds[kind]);
  if (kind == LOCKSTEP_BARRIER) return text + ")";
  if (has_reduce(static_cast<lockstep_op_kind>(kind))) text += fmt::format("{}, ", kReduces[reduce]);
  text += kDtypes[dtype];
  if (kind == LOCKSTEP_ALL_TO_ALL_V) return text + ", counts per peer)";
  text += fmt::format(", {} elements", count);
  if (has_root(static_cast<lockstep_op_kind>(kind))) text += fmt::format(", root {}", root);
  return text + ")";
}

std::string describe_call(const PublishedCall& call) {
  const std::string where(call.where, ::strnlen(call.where, sizeof(call.where)));
  return fmt::format("{} #{}{}{}", describe_call(call.fingerprint), call.number, where.empty() ? "" : " at ",
                     where);
}

std::string describe_last(CommBlock& block) {
  const auto last = std::max(block.arrivals[0].sequence.load(std::memory_order_acquire),
                             block.arrivals[1].sequence.load(std::memory_order_acquire)) >>
                    1;
  if (last == 0) return "has entered no operation yet";
  return "last entered " + describe_call(block.history[last % kHistory]);
}

}  // namespace lockstep::comm::internal
