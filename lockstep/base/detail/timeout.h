// Timeouts as users give them.
#pragma once

#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::base {

// `timeout` itself. Raises kUsage, naming `what` it is for, when it is zero or negative.
inline Milliseconds checked_timeout(Milliseconds timeout, std::string_view what) {
  if (timeout.count() > 0) return timeout;
  raise(ErrorKind::kUsage,
        cat(what, ": a timeout of ", timeout.count(), " ms; it must be positive, kNoTimeout waits for ever"));
}

}  // namespace lockstep::base
