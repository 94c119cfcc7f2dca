// A collective in flight, or over. A small value: copies share the operation, the last one to go releases it. The
// operation keeps its tensors alive; dropping a Work does not cancel it.
// Thread safety: every method may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep {

class Work {
 public:
  // Over already, with nothing to show: what a world of one and non-members get.
  Work();

  // Blocks until the operation is over; raises its error. Without a timeout it waits as long as the operation's
  // own deadline allows; with one, raises kTimeout when it passes first (the operation goes on).
  void wait(std::optional<Milliseconds> timeout = {}) const;
  // Never blocks.
  bool is_completed() const;
  // Over and without error.
  bool is_success() const;
  // The error, or null while running and after success.
  std::exception_ptr exception() const;
  // Output tensors. Raises kUsage before completion, the operation's error after a failure.
  std::vector<at::Tensor> result() const;
  // Number of the operation in its group, from 1; 0 for an empty Work.
  std::uint64_t sequence_number() const;

  class State;  // private to group/
  explicit Work(std::shared_ptr<State> state);
  // An operation that ended well, with one output. Needs no shared state: the quick path of blocking calls.
  Work(at::Tensor result, std::uint64_t sequence_number);

 private:
  std::shared_ptr<State> state_;  // null when over from the start; then the two below
  at::Tensor result_;
  std::uint64_t sequence_number_ = 0;
};

}  // namespace lockstep
