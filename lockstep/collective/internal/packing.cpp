#include "lockstep/collective/internal/packing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <numeric>

namespace lockstep::internal {
namespace {

// The tensors are one piece of memory, in order: the engine can use it without a copy.
bool is_one_piece(const std::vector<at::Tensor>& list) {
  const auto& first = list.front();
  const auto* next = static_cast<const char*>(first.const_data_ptr());
  for (const auto& tensor : list) {
    if (!is_plain(tensor) || !tensor.is_alias_of(first) || tensor.const_data_ptr() != next) return false;
    next += tensor.nbytes();
  }
  return true;
}

// Shorter runs than this many bytes are moved faster by a copy of the whole tensor.
constexpr std::int64_t kShortestRun = 256;

// The dimension along which a piece of a contiguous tensor was cut: the one inside the first, seen from the
// end, whose stride is not that of a contiguous tensor of the piece's sizes. -1 when there is none.
std::int64_t cut_dim(const at::Tensor& piece) {
  std::int64_t expected = 1, inside = -1;
  for (std::int64_t d = piece.dim(); d-- > 0;) {
    if (piece.size(d) == 1) continue;
    if (piece.stride(d) != expected) return inside;
    expected *= piece.size(d);
    inside = d;
  }
  return -1;
}

// Like `other` but flat.
at::Tensor flat(std::int64_t numel, const at::Tensor& other) {
  return at::empty({numel}, at::TensorOptions().dtype(other.scalar_type()).device(other.device()));
}

std::int64_t numel_of(const std::vector<at::Tensor>& list) {
  std::int64_t numel = 0;
  for (const auto& tensor : list) numel += tensor.numel();
  return numel;
}

// The buffer cut into views of the list's sizes.
std::vector<at::Tensor> cut_like(const at::Tensor& buffer, const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> views;
  std::int64_t start = 0;
  for (const auto& tensor : list) {
    views.push_back(buffer.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
  return views;
}

}  // namespace

// The parts must be what narrow() makes of one contiguous tensor, in order and without gaps: then part i begins
// where part i - 1 ends within a row, and the distance of two rows is the sum of all parts. The engine is told
// the number of rows only and derives the rest from the counts, so anything else would be read wrongly.
std::uint64_t rows_of(const std::vector<at::Tensor>& list) {
  const auto& first = list.front();
  if (std::ranges::any_of(list, [](const auto& t) { return t.numel() == 0 || t.is_conj() || t.is_neg(); }))
    return 0;
  const auto dim = cut_dim(first);
  if (dim < 0) return is_one_piece(list) ? 1 : 0;
  const auto inner = first.stride(dim) * static_cast<std::int64_t>(first.element_size());
  std::int64_t cut = 0, rows = 1;
  for (const auto& tensor : list) {
    auto sizes = first.sizes().vec();
    if (tensor.dim() != first.dim()) return 0;
    sizes[static_cast<std::size_t>(dim)] = tensor.size(dim);
    const auto* const at = static_cast<const char*>(first.const_data_ptr()) + cut * inner;
    if (tensor.sizes() != at::IntArrayRef(sizes) || tensor.strides() != first.strides() ||
        !tensor.is_alias_of(first) || tensor.const_data_ptr() != at ||
        tensor.size(dim) * inner < kShortestRun)
      return 0;
    cut += tensor.size(dim);
  }
  // The dimensions outside the cut one are those of a contiguous tensor that has all of it.
  auto expected = first.stride(dim) * cut;
  for (std::int64_t d = dim; d-- > 0;) {
    if (first.size(d) != 1 && first.stride(d) != expected) return 0;
    expected *= first.size(d);
    rows *= first.size(d);
  }
  return static_cast<std::uint64_t>(rows);
}

std::vector<std::uint64_t> counts_of(const std::vector<at::Tensor>& list, Wire wire) {
  std::vector<std::uint64_t> counts;
  for (const auto& tensor : list) counts.push_back(static_cast<std::uint64_t>(tensor.numel() * wire.units));
  return counts;
}

at::Tensor flat_as(const at::Tensor& tensor, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const auto elements = plain(tensor).reshape({-1});
  if (tensor.scalar_type() == type) return elements;
  if (tensor.is_complex()) return at::view_as_real(elements).view({-1});
  return at::view_as_complex(elements.view({elements.numel() / 2, 2}));
}

bool have_one_size(const std::vector<at::Tensor>& list) {
  return std::ranges::all_of(list, [&](const auto& tensor) { return tensor.numel() == list[0].numel(); });
}

at::Tensor packed(const std::vector<at::Tensor>& list) {
  if (is_one_piece(list)) return list.front();
  const at::NoGradGuard no_grad;
  auto buffer = flat(numel_of(list), list.front());
  const auto views = cut_like(buffer, list);
  for (std::size_t i = 0; i < list.size(); ++i) views[i].copy_(list[i]);
  return buffer;
}

at::Tensor room_for(const std::vector<at::Tensor>& list, bool use_temporary, HeldTensors& held) {
  // The results are the caller's tensors in either case; what is received elsewhere is copied into them when the
  // operation has succeeded.
  held.results = list;
  if (!use_temporary && is_one_piece(list)) return list.front();
  auto buffer = flat(numel_of(list), list.front());
  const auto views = cut_like(buffer, list);
  for (std::size_t i = 0; i < list.size(); ++i) held.copies.emplace_back(list[i], views[i]);
  return buffer;
}

at::Tensor room_for(const at::Tensor& output, bool use_temporary, HeldTensors& held) {
  held.results = {output};
  if (is_plain(output) && !use_temporary) return output;
  auto temporary = plain_like(output);
  held.copies.emplace_back(output, temporary);
  return temporary;
}

std::vector<at::Tensor> all_gather_parts(const CollectiveCall& call, const at::Tensor& send,
                                         const std::vector<std::uint64_t>& counts,
                                         std::vector<lockstep_op>& ops, HeldTensors& held) {
  const at::NoGradGuard no_grad;
  const auto wire = call.wire_for_move(send.scalar_type());
  const auto units = static_cast<std::uint64_t>(wire.units);
  const auto numel = [&](std::size_t r) { return static_cast<std::int64_t>(counts[r] / units); };
  // Every rank asks the same engine, so all choose the same form.
  const bool exact = call.offers(LOCKSTEP_ALL_GATHER_V);
  const auto longest = static_cast<std::int64_t>(std::ranges::max(counts) / units);
  auto from = plain(send).flatten();
  if (!exact && from.numel() < longest) {  // every rank sends as much as the one with most
    auto padded = flat(longest, send).zero_();
    padded.narrow(0, 0, from.numel()).copy_(from);
    from = padded;
  }
  const auto total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}) / units;
  const auto room = exact ? static_cast<std::int64_t>(total) : longest * call.size();
  const auto to = flat(room, send);
  std::vector<at::Tensor> parts;
  for (std::int64_t r = 0, start = 0; r < call.size(); ++r) {
    const auto n = numel(static_cast<std::size_t>(r));
    parts.push_back(to.narrow(0, exact ? start : r * longest, n));
    start += n;
  }
  lockstep_op op{};
  op.struct_size = sizeof op;
  op.kind = exact ? LOCKSTEP_ALL_GATHER_V : LOCKSTEP_ALL_GATHER;
  op.dtype = wire.dtype;
  op.send = from.const_data_ptr();
  op.recv = to.mutable_data_ptr();
  if (exact) {
    op.recv_counts = counts.data();
  } else {
    op.count = static_cast<std::uint64_t>(longest) * units;
  }
  ops.push_back(op);
  // `op` has their addresses, and `counts` of the caller, which must live until the operation was posted.
  held.buffers.push_back(std::move(from));
  held.buffers.push_back(to);
  return parts;
}

}  // namespace lockstep::internal
