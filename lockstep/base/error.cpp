#include "lockstep/base/error.h"

#include <cerrno>
#include <system_error>

#include "lockstep/base/detail/loss_note.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/text.h"

namespace lockstep {

std::string_view to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kUsage:
      return "usage";
    case ErrorKind::kTimeout:
      return "timeout";
    case ErrorKind::kPeerLost:
      return "peer_lost";
    case ErrorKind::kAborted:
      return "aborted";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kResource:
      return "resource";
    case ErrorKind::kSystem:
      return "system";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "internal";
}

namespace base {

void raise(Failure failure) {
  if (failure.kind == ErrorKind::kPeerLost && this_rank_thread() == nullptr) note_loss(failure.message);
  switch (failure.family) {
    case ErrorFamily::kBackend:
      throw DistBackendError(std::move(failure));
    case ErrorFamily::kNetwork:
      throw DistNetworkError(std::move(failure));
    case ErrorFamily::kStore:
      throw DistStoreError(std::move(failure));
    case ErrorFamily::kGeneral:
      break;
  }
  throw Error(std::move(failure));
}

void raise(ErrorKind kind, std::string message, ErrorFamily family) {
  raise(Failure{.kind = kind, .message = std::move(message), .family = family});
}

Failure system_failure(int code, std::string_view what, ErrorFamily family) {
  const bool resource = code == ENOMEM || code == ENOSPC || code == EMFILE || code == ENFILE;
  return {.kind = resource ? ErrorKind::kResource : ErrorKind::kSystem,
          .message = cat(what, ": ", std::generic_category().message(code), " (errno ", code, ")"),
          .family = family};
}

namespace {

// What `make` gives; where there is no memory for its text, one that needs none.
template <class Make>
Failure or_short(ErrorKind kind, const Make& make) noexcept {
  try {
    return make();
  } catch (...) {
    return {.kind = kind, .message = "no memory"};
  }
}

}  // namespace

Failure current_failure() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return or_short(error.kind(), [&] { return error.failure(); });
  } catch (const std::exception& error) {
    return or_short(ErrorKind::kInternal,
                    [&] { return Failure{.kind = ErrorKind::kInternal, .message = error.what()}; });
  } catch (...) {
    return {.kind = ErrorKind::kInternal, .message = "unknown error"};
  }
}

}  // namespace base
}  // namespace lockstep
