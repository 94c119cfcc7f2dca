// Counts the operations that a block of a program starts: how many of which.
//
//   CommDebugScope scope;
//   model->forward(x);
//   EXPECT_EQ(scope.count(OpType::kAllReduce), 1);
//
// Counts what this rank starts on any of its threads, backward passes included: the whole process, or inside
// run_threads this rank's threads (there not autograd's threads of other devices, which belong to no rank). Operations of a CoalescingScope count as the one they become. Scopes nest
// and may overlap; each counts all. Thread safety: every method may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "lockstep/group/work.h"

namespace lockstep {

namespace internal {
void count_operation(OpType type) noexcept;  // once per operation that is started
}

class CommDebugScope {
 public:
  CommDebugScope();
  ~CommDebugScope();
  CommDebugScope(const CommDebugScope&) = delete;
  CommDebugScope& operator=(const CommDebugScope&) = delete;

  // Since the scope began.
  std::int64_t count(OpType type) const;
  std::int64_t total() const;
  // "all_gather 1, all_reduce 2"; "none".
  std::string describe() const;

 private:
  friend void internal::count_operation(OpType type) noexcept;
  static constexpr std::size_t kTypes = 128;
  const void* const rank_;  // the rank thread that made it; null in a process of one rank
  std::array<std::atomic<std::int64_t>, kTypes> counts_{};
};

}  // namespace lockstep
