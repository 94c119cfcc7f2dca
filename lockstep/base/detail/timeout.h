// Timeouts as users give them: positive, or kNoTimeout. Zero means nothing, so that a forgotten or computed
// zero is neither a wait without end nor one that fails at once.
#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::base {

// `timeout` itself. Raises kUsage, naming `what` it is for, when it is zero or negative.
inline Milliseconds checked_timeout(Milliseconds timeout, std::string_view what,
                                    ErrorFamily family = ErrorFamily::kGeneral) {
  if (timeout.count() > 0) return timeout;
  raise(ErrorKind::kUsage,
        cat(what, ": a timeout of ", timeout.count(), " ms; it must be positive, kNoTimeout waits forever"),
        family);
}

// The timeout of a part of a call that must be over by `deadline`: at least a millisecond, kNoTimeout for
// never.
inline Milliseconds time_left(Deadline deadline) {
  if (deadline.is_never()) return kNoTimeout;
  return std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline.remaining()));
}

// Twice as long; kNoTimeout stays what it is.
inline Milliseconds twice(Milliseconds timeout) {
  return timeout > kNoTimeout / 2 ? kNoTimeout : timeout * 2;
}

}  // namespace lockstep::base
