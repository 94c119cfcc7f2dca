// The shared state behind a Work. Whichever thread first sees that the engine is done finishes the operation: copies
// temporaries back, records the error, lets the buffers go; exactly once, under the mutex.
// Thread safety: every method may be called from any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/group/internal/core.h"
#include "lockstep/group/internal/group_base.h"
#include "lockstep/group/work.h"

namespace lockstep {

class Work::State final {
 public:
  // An operation in flight.
  State(std::shared_ptr<internal::Core> core, comm::OpHandle handle, const internal::Request& request,
        std::uint64_t sequence, internal::Held held);
  // One that ended well.
  State(std::uint64_t sequence, std::vector<at::Tensor> results);

  // True when over. Never waits for the engine.
  bool poll();
  // True when over by the deadline. Raises nothing.
  bool settle(Deadline deadline);
  // Raises the operation's error, or kTimeout when it is not over by then.
  void wait(std::optional<Milliseconds> timeout);

  std::optional<Failure> failure();
  std::vector<at::Tensor> results();
  std::uint64_t sequence_number() const { return sequence_; }

 private:
  void finish(lockstep_status status);  // mutex_ held
  std::string describe() const;

  // Constant after construction.
  const char* const name_;
  const std::source_location where_;
  const std::uint64_t sequence_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // All below guarded by mutex_, but that handle_ belongs to the waiting thread while waiting_ is set.
  bool over_ = false;
  bool waiting_ = false;
  std::shared_ptr<internal::Core> core_;  // null when over
  comm::OpHandle handle_;
  internal::Held held_;
  std::optional<Failure> failure_;
};

}  // namespace lockstep
