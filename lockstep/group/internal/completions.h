// The process's completion thread, "ls-callback": gives futures their values, so that callbacks run although nobody
// waits. Started by the first future of an operation in flight, joined when the process exits; what ends after that
// resolves no future. Thread safety: every function may be called from any thread; hand_over never blocks.
#pragma once

#include <memory>

#include "lockstep/group/work.h"

namespace lockstep::internal {

// Starts the thread when it is not there. Before the first hand_over, on a thread that may block.
void start_completions();
// The operation is over, or about to be by another thread's doing: finish it and resolve its futures.
void hand_over(std::shared_ptr<Work::State> state) noexcept;
// The engine calls nobody back: ask it every millisecond until the operation is over.
void watch(std::shared_ptr<Work::State> state);

}  // namespace lockstep::internal
