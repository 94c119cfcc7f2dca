// Errors. One base, lockstep::Error (torch's DistError); its kind says what the caller can do about it.
// Inside loops and across threads errors are passed as Failure, a copyable value; raise() throws the matching
// exception at the API. Thread safety: values, no shared state.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep {

// Kinds are distinguished by how the caller should react.
enum class ErrorKind : std::uint8_t {
  kUsage,        // the call is wrong: fix the program
  kTimeout,      // the deadline passed: wait longer, or find who is late
  kPeerLost,     // another rank is lost: restart, or continue without it
  kAborted,      // abort was called or the object was shut down
  kUnsupported,  // this engine, store or platform cannot do it: choose another
  kResource,     // memory, descriptors, disk: give the job more
  kSystem,       // the kernel or the network reported an error
  kInternal,     // a bug in lockstep: report it
};
std::string_view to_string(ErrorKind kind) noexcept;

// Which part of the library failed; selects the exception's class.
enum class ErrorFamily : std::uint8_t { kGeneral, kBackend, kNetwork, kStore };

// A lost rank, as far as it is known: a connection may close before its rank is. cause is text ("killed by
// SIGKILL", "gone, cause unknown").
struct LostPeer {
  std::optional<int> rank{};
  std::optional<std::int64_t> pid{};
  std::string cause{};
};

// The copyable value of an error.
struct Failure {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;
  ErrorFamily family = ErrorFamily::kGeneral;
  std::optional<LostPeer> peer;  // set when kind is kPeerLost
};

class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure) : std::runtime_error(failure.message), failure_(std::move(failure)) {}
  ErrorKind kind() const noexcept { return failure_.kind; }
  const std::optional<LostPeer>& peer() const noexcept { return failure_.peer; }
  const Failure& failure() const noexcept { return failure_; }

 private:
  Failure failure_;
};

// A collective, a group or an engine failed.
class DistBackendError : public Error {
 public:
  using Error::Error;
};
// A socket could not be opened, connected or used.
class DistNetworkError : public Error {
 public:
  using Error::Error;
};
// A store operation failed or timed out.
class DistStoreError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep
