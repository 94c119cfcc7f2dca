// A child's final report: a memfd that the child writes and its starter reads once the child has ended.
// Unlike a pipe it needs no concurrent reader, and unlike a file it leaves nothing behind. Thread safety: one
// thread at a time per descriptor.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/detail/fd.h"

namespace lockstep::process {

inline constexpr std::size_t kMaxReport = 64 << 10;

// Close-on-exec. Raises kResource when there are no descriptors left.
base::Fd make_report();
// At most kMaxReport bytes; "" when nothing was written.
std::string read_report(int report);
// Replaces the content; truncated to kMaxReport bytes.
void write_report(int report, std::string_view text) noexcept;

}  // namespace lockstep::process
