#include "lockstep/rpc/failure.h"

#include <cxxabi.h>

#include <stdexcept>
#include <typeinfo>

#include "lockstep/base/detail/demangle.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/stack_trace.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::rpc {
namespace {

// An exception on the wire. Name and version must match on both sides; one of another version becomes "an
// exception that cannot be read".
struct ExceptionRecord {
  std::uint8_t kind = 0;
  std::uint8_t family = 0;
  std::string type;
  std::string text;
  std::string trace;
  std::int32_t lost_rank = -1;  // of a kPeerLost; negative: unknown
  std::string lost_cause;
};
auto lockstep_fields(SelfOf<ExceptionRecord> auto& self) {
  return fields({.name = "lockstep.rpc.Exception", .version = 1}, self.kind, self.family, self.type,
                self.text, self.trace, self.lost_rank, self.lost_cause);
}

// The type as thrown, before any conversion to Error.
std::string current_type() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "unknown";
  return base::demangle(type->name());
}

// An exception that was something else where it was thrown, and is passed on as that: a future kept it, and
// who waits for the future raises it again. Its caller on another worker still sees the original type.
class Renamed final : public Error {
 public:
  explicit Renamed(const CallFailure& failure)
      : Error(failure.failure), type(failure.type), trace(failure.trace) {}
  const std::string type;
  const std::string trace;
};

// libtorch's errors carry the stack of where they were raised in what(): that is not for the message, and the
// better trace.
void take_stack(CallFailure& failure) {
  std::string& text = failure.failure.message;
  const auto stack = text.find("\nException raised from ");
  if (stack == std::string::npos) return;
  // Only replaced where a trace was asked for.
  if (!failure.trace.empty()) failure.trace = text.substr(stack + 1);
  text.resize(stack);
}

}  // namespace

void CallFailure::raise() const {
  // Raised on another worker; an exception of another type that was kept here; lockstep's own.
  if (remote) throw RemoteError(failure, *remote);
  if (type != CallFailure().type) throw Renamed(*this);
  lockstep::base::raise(failure);
}

void log_current_failure(const char* what) noexcept {
  try {
    base::log(LogLevel::kError, base::cat(what, ": ", base::current_failure().message));
  } catch (...) {
    base::log(LogLevel::kError, what);
  }
}

// An exception of the user's function is kUsage for its caller: lockstep itself works. lockstep's own errors
// keep their kind.
CallFailure current_call_failure() noexcept {
  CallFailure result;
  try {
    result.type = current_type();
    result.trace = base::stack_trace_if_asked();
    throw;
  } catch (const RemoteError& error) {
    result.failure = error.failure();
    result.remote = RemoteCause{.worker = error.worker(),
                                .type = error.remote_type(),
                                .text = error.remote_text(),
                                .trace = error.trace()};
  } catch (const Renamed& error) {
    result.failure = error.failure();
    result.type = error.type;
    result.trace = error.trace;
  } catch (const Error& error) {
    result.failure = error.failure();
  } catch (...) {
    result.failure = base::current_failure();
    result.failure.kind = ErrorKind::kUsage;
    take_stack(result);
  }
  return result;
}

Bytes encode_failure(const CallFailure& failure) noexcept {
  try {
    ExceptionRecord record{.kind = static_cast<std::uint8_t>(failure.failure.kind),
                           .family = static_cast<std::uint8_t>(failure.failure.family),
                           .type = failure.type,
                           .text = failure.failure.message,
                           .trace = failure.trace};
    if (failure.failure.peer) {
      record.lost_rank = failure.failure.peer->rank.value_or(-1);
      record.lost_cause = failure.failure.peer->cause;
    }
    return encode(record);
  } catch (...) {
    return {};  // read as an exception that cannot be read
  }
}

// Input from another program, perhaps of another version: numbers beyond the known kinds are not cast.
CallFailure decode_failure(const WorkerInfo& from, std::span<const std::uint8_t> bytes) noexcept {
  try {
    auto record = decode<ExceptionRecord>(bytes);
    if (record.kind > static_cast<std::uint8_t>(ErrorKind::kInternal) ||
        record.family > static_cast<std::uint8_t>(ErrorFamily::kStore)) {
      return {.failure = {.kind = ErrorKind::kInternal,
                          .message = base::cat("On ", from.text(), ": an exception that cannot be read")}};
    }
    Failure failure{
        .kind = static_cast<ErrorKind>(record.kind),
        .message = base::cat("On ", from.text(), ": ", record.type, ": ", record.text, record.trace),
        .family = static_cast<ErrorFamily>(record.family)};
    if (failure.kind == ErrorKind::kPeerLost) {
      failure.peer = LostPeer{.cause = record.lost_cause};
      if (record.lost_rank >= 0) failure.peer->rank = record.lost_rank;
    }
    return {.failure = std::move(failure),
            .remote = RemoteCause{.worker = from,
                                  .type = std::move(record.type),
                                  .text = std::move(record.text),
                                  .trace = std::move(record.trace)}};
  } catch (...) {
    return {.failure = {.kind = ErrorKind::kInternal,
                        .message = base::cat("On ", from.text(), ": an exception that cannot be read")}};
  }
}

Failure timeout_failure(const std::string& what, Milliseconds timeout) {
  return {.kind = ErrorKind::kTimeout,
          .message = base::cat("RPCErr:", static_cast<int>(RpcErrorCode::kTimeout), ": ", what,
                               " got no answer within ", timeout.count(),
                               " milliseconds; give it longer with .timeout, or look at what it waits for")};
}

}  // namespace lockstep::rpc
