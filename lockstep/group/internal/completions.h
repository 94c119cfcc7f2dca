// The process's completion threads, "ls-completion": give futures their values, so that callbacks run
// although nobody waits.
//
// Operations are completed one after the other by one of them, the runner, so that callbacks are as a rule
// not run at the same time. A callback that lasts (it blocks, perhaps on the future of another operation,
// which needs completing) is given a few milliseconds; then another thread becomes the runner. There is
// always a spare one for that, so any number of callbacks may block.
//
// Started by the first future of an operation in flight, joined when the process exits, after the callbacks
// that run then; what ends later resolves no future. Thread safety: every function may be called from any
// thread; hand_over never blocks.
#pragma once

#include <memory>

#include "lockstep/group/work.h"

namespace lockstep::internal {

// Starts the threads when they are not there. Before the first hand_over, on a thread that may block.
void start_completions();
// The operation is over, or about to be by another thread's doing: finish it and resolve its futures.
void hand_over(std::shared_ptr<Work::State> state) noexcept;
// The engine calls nobody back: ask it every millisecond until the operation is over.
void watch(std::shared_ptr<Work::State> state);

}  // namespace lockstep::internal
