// A set of ranks that communicate: rank, size, name and an engine's communicator. Held by shared_ptr (Group), since
// operations in flight and reducers must outlive the caller's handle.
// Thread safety: operations may be started from any thread, but all ranks must start them in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/store/store.h"

namespace lockstep {

class ProcessGroup;
// Null means the default group of this process, or of this rank thread.
using Group = std::shared_ptr<ProcessGroup>;

// 30 minutes, as in torch for every back end but NCCL.
inline constexpr Milliseconds kDefaultGroupTimeout{30 * 60 * 1000};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // "host" for the built-in engine, "none" in a world of one.
  virtual std::string backend() const = 0;
  virtual Milliseconds timeout() const = 0;
  virtual void set_timeout(Milliseconds timeout) = 0;
  // The group's own part of the rendezvous store; null in a world of one that has none.
  virtual std::shared_ptr<Store> store() const = 0;
  // Number of the last operation started.
  virtual std::uint64_t sequence_number() const = 0;
  // Breaks the group on every rank: pending and later operations raise kAborted with `reason`. Not collective, any
  // thread, returns at once.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace lockstep
