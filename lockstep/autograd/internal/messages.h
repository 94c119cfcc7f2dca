// What workers tell each other during a backward pass (docs/wire.md), and how it fails.
// Value types.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/failure.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::autograd::internal {

using rpc::WorkerId;

// Which pass a message is about, and all a worker needs to take part in it.
struct PassHead {
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  WorkerId origin = 0;  // where backward() was called
  bool retain_graph = false;
  bool fast = false;
  std::int64_t timeout_ms = 0;  // 0: none

  void write(base::ByteWriter& writer) const;
  // Raises kUsage for bytes that are none.
  static PassHead read(base::ByteReader& reader);
};

// A message that begins with it.
base::ByteWriter with_head(const PassHead& head);

// How the answer to a plan, and the report of a part, begin.
inline constexpr std::uint8_t kOk = 0;
inline constexpr std::uint8_t kFailed = 1;  // a NodeFailure follows
// How long a failed pass waits for the others to have given up, so that the context can be used at once.
inline constexpr Milliseconds kGiveUp{2000};

// What went wrong, and on which worker. failure.message is the exception's own text.
struct NodeFailure {
  WorkerId worker = 0;
  Failure failure{};
  std::string type{};

  static NodeFailure of(WorkerId worker, const rpc::CallFailure& failure);
  void write(base::ByteWriter& writer) const;
  static NodeFailure read(base::ByteReader& reader);
  // "Error on Node 1: <text> (worker1, std::runtime_error)". Remote: it happened on another worker.
  [[noreturn]] void raise(const std::string& name, bool remote) const;
};

// Messages whose send nodes will be reached, by the worker that sent them.
using PlanRequests = std::map<WorkerId, std::vector<std::uint64_t>>;
void write_messages(base::ByteWriter& writer, std::span<const std::uint64_t> messages);
std::vector<std::uint64_t> read_messages(base::ByteReader& reader);
void write_plan_requests(base::ByteWriter& writer, const PlanRequests& requests);
PlanRequests read_plan_requests(base::ByteReader& reader);
void write_workers(base::ByteWriter& writer, const std::vector<WorkerId>& workers);
std::vector<WorkerId> read_workers(base::ByteReader& reader);
[[noreturn]] void raise_damaged();

template <class T>
T need(const std::optional<T>& value) {
  if (!value) raise_damaged();
  return *value;
}

}  // namespace lockstep::autograd::internal
