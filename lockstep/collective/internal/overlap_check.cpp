#include "lockstep/collective/internal/overlap_check.h"

#include <algorithm>
#include <iterator>

namespace lockstep::internal {

// None for a tensor with gaps, and for one that has no memory: empty, undefined or meta.
std::optional<OverlapCheck::Range> OverlapCheck::range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return std::nullopt;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (begin == 0) return std::nullopt;
  return Range{begin, begin + tensor.nbytes()};
}

bool OverlapCheck::add(const at::Tensor& written, const at::Tensor& read) {
  const auto to = range_of(written), from = range_of(read);
  if (meets_written(written) || meets_written(read) || (to && meets(read_, *to))) return false;
  if (to) {
    join(written_, *to);
  } else if (written.numel() > 0) {
    scattered_.insert(written.unsafeGetTensorImpl());
  }
  if (from) join(read_, *from);
  return true;
}

bool OverlapCheck::meets_written(const at::Tensor& tensor) const {
  if (const auto range = range_of(tensor)) return meets(written_, *range);
  return tensor.defined() && scattered_.contains(tensor.unsafeGetTensorImpl());
}

bool OverlapCheck::meets(const Ranges& ranges, Range range) {
  const auto behind = ranges.lower_bound(range.end);
  return behind != ranges.begin() && std::prev(behind)->second > range.begin;
}

void OverlapCheck::join(Ranges& ranges, Range range) {
  auto first = ranges.upper_bound(range.begin);
  if (first != ranges.begin() && std::prev(first)->second > range.begin) --first;
  auto last = first;
  for (; last != ranges.end() && last->first < range.end; ++last) {
    range.begin = std::min(range.begin, last->first);
    range.end = std::max(range.end, last->second);
  }
  ranges.erase(first, last);
  ranges.emplace(range.begin, range.end);
}

}  // namespace lockstep::internal
