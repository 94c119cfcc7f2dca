// How lockstep raises its errors. Thread safety: every function may be called from any thread.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/error.h"

namespace lockstep::base {

// Throws the exception class of the failure's family. A kPeerLost is also recorded for the starter of this
// process (loss_note.h).
[[noreturn]] void raise(Failure failure);
[[noreturn]] void raise(ErrorKind kind, std::string message, ErrorFamily family = ErrorFamily::kGeneral);

// A kSystem failure (kResource for ENOMEM, ENOSPC, EMFILE, ENFILE) with strerror's text for errno value
// `code`.
Failure system_failure(int code, std::string_view what, ErrorFamily family = ErrorFamily::kGeneral);

// The current exception as a value; call inside a catch block. Other exceptions become kInternal with their
// what().
Failure current_failure() noexcept;

}  // namespace lockstep::base
