// A place for a child's last words: a memfd that the child writes and its starter reads once the child is gone.
// Unlike a pipe it takes a text with nobody reading, and unlike a file it leaves nothing behind.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/detail/fd.h"

namespace lockstep {

inline constexpr std::size_t kMaxReport = 64 << 10;

// Close-on-exec. Raises kResource when there are no descriptors left.
base::Fd make_report();
// At most kMaxReport bytes; "" when nothing was written.
std::string read_report(int report);
// Replaces what is there; cut to kMaxReport bytes. Never throws.
void write_report(int report, std::string_view text) noexcept;

}  // namespace lockstep
