// What can go wrong with a call, as a value, and the exceptions it becomes.
//
// The callee's exception comes back as RemoteError: an Error of the same kind where the callee threw one of
// ours, with the worker, the type and the text of the exception, and its stack when the callee shows stacks.
// A call that timed out is kTimeout with "RPCErr:1" and the milliseconds; a worker that is gone is kPeerLost
// naming it.
// Thread safety: value types and functions without state.
#pragma once

#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/object/object.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc {

// torch's numbers, in messages as "RPCErr:<n>".
enum class RpcErrorCode : int { kUnknown = 0, kTimeout = 1, kIntentional = 2 };

// Where an exception came from.
struct RemoteCause {
  WorkerInfo worker;
  std::string type;   // "std::runtime_error"
  std::string text;   // what()
  std::string trace;  // "" unless TORCH_SHOW_CPP_STACKTRACES is on at the callee
};

class RemoteError : public Error {
 public:
  RemoteError(Failure failure, RemoteCause cause) : Error(std::move(failure)), cause_(std::move(cause)) {}
  const WorkerInfo& worker() const noexcept { return cause_.worker; }
  const std::string& remote_type() const noexcept { return cause_.type; }
  const std::string& remote_text() const noexcept { return cause_.text; }
  const std::string& trace() const noexcept { return cause_.trace; }

 private:
  RemoteCause cause_;
};

// The copyable value. Not remote: raised as an Error, which keeps the type for current_call_failure. An
// exception that is not an Error becomes one of kind kUsage: there is no kind for "the function failed", and
// the remedy is to fix the program or its input.
struct CallFailure {
  Failure failure{};
  std::optional<RemoteCause> remote{};
  std::string type = "lockstep::Error";  // of the exception, as C++ calls it
  std::string trace{};

  [[noreturn]] void raise() const;
};

// The current exception; call inside a catch block. A RemoteError stays one.
CallFailure current_call_failure() noexcept;
// A log line with the current exception, also when there is no memory for its text; call inside a catch
// block.
void log_current_failure(const char* what) noexcept;
// As the callee sends it.
Bytes encode_failure(const CallFailure& failure) noexcept;
// What `from` sent: "On WorkerInfo(id=1, name=worker1): std::runtime_error: ...". Damaged bytes give a
// kInternal failure.
CallFailure decode_failure(const WorkerInfo& from, std::span<const std::uint8_t> bytes) noexcept;

Failure timeout_failure(const std::string& what, Milliseconds timeout);

}  // namespace lockstep::rpc
