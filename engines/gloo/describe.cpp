#include "engines/gloo/describe.h"

#include <cstring>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {
namespace {

constexpr const char* kKinds[] = {"barrier",      "broadcast", "all_reduce", "all_gather", "reduce_scatter",
                                  "reduce",       "gather",    "scatter",    "all_to_all", "all_to_all_v",
                                  "all_gather_v", "send",      "recv"};
constexpr const char* kDtypes[] = {"u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"};
constexpr const char* kReduces[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
static_assert(std::size(kKinds) == LOCKSTEP_OP_KINDS && std::size(kDtypes) == LOCKSTEP_DTYPES &&
              std::size(kReduces) == LOCKSTEP_REDUCE_OPS);

template <std::size_t kCount>
const char* name(const char* const (&names)[kCount], std::uint32_t index) {
  return index < kCount ? names[index] : "unknown";
}

std::uint64_t hash(const std::uint64_t* counts, int n) {
  std::uint64_t sum = 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < n; ++i) {
    sum = (sum ^ counts[i]) * 0xFF51AFD7ED558CCDull;
    sum ^= sum >> 32;
  }
  return sum;
}

}  // namespace

CallHeader describe(const lockstep_op& op, std::uint64_t sequence, int size) {
  CallHeader call;
  call.sequence = sequence;
  if (!is_point_to_point(op.kind)) call.number = static_cast<std::uint64_t>(op.tag);
  call.kind = op.kind;
  if (op.kind != LOCKSTEP_BARRIER) call.dtype = op.dtype;
  if (has_reduce(op.kind)) call.reduce = op.reduce;
  if (has_root(op.kind) || is_point_to_point(op.kind)) call.root = op.root;
  if (op.kind != LOCKSTEP_BARRIER && !comm::is_uneven(op.kind)) call.count = op.count;
  if (op.kind == LOCKSTEP_ALL_GATHER_V) call.counts_hash = hash(op.recv_counts, size);
  if (op.where != nullptr) {
    // The end of a long path says more than its beginning.
    const std::size_t length = std::strlen(op.where), most = sizeof(call.where) - 1;
    std::memcpy(call.where, op.where + (length > most ? length - most : 0), length > most ? most : length);
  }
  return call;
}

bool match(const CallHeader& mine, const CallHeader& theirs) {
  return mine.sequence == theirs.sequence && mine.kind == theirs.kind && mine.dtype == theirs.dtype &&
         mine.reduce == theirs.reduce && mine.root == theirs.root && mine.count == theirs.count &&
         mine.counts_hash == theirs.counts_hash && mine.number == theirs.number;
}

std::string text_of(const CallHeader& call) {
  std::ostringstream out;
  out << name(kKinds, call.kind) << '(';
  const auto kind = static_cast<lockstep_op_kind>(call.kind < LOCKSTEP_OP_KINDS ? call.kind : 0);
  if (call.kind != LOCKSTEP_BARRIER) {
    if (has_reduce(kind)) out << name(kReduces, call.reduce) << ", ";
    out << name(kDtypes, call.dtype);
    if (kind == LOCKSTEP_ALL_TO_ALL_V) {
      out << ", uneven";
    } else if (kind == LOCKSTEP_ALL_GATHER_V) {
      out << ", uneven counts " << std::hex << (call.counts_hash & 0xFFFF) << std::dec;
    } else {
      out << ", " << call.count << " elements";
    }
    if (has_root(kind)) out << ", root " << call.root;
  }
  out << ')';
  if (call.sequence != 0) out << " #" << (call.number != 0 ? call.number : call.sequence);
  const std::string where(call.where, ::strnlen(call.where, sizeof call.where));
  if (!where.empty()) out << " at " << where;
  return out.str();
}

}  // namespace lockstep::gloo_plugin
