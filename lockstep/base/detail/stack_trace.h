// The calling thread's C++ stack as text, for error messages. Thread safety: any thread; not
// async-signal-safe.
#pragma once

#include <string>

namespace lockstep::base {

// One line per frame, innermost first: "#1 lockstep::barrier(...) +0x1f (train+0x41c3f)". Omits this
// function's frame and `skip` frames above it. Names come from the dynamic linker or from the file's symbol
// table, unless it is stripped.
std::string stack_trace(int skip = 0);

// "" unless TORCH_SHOW_CPP_STACKTRACES is on; otherwise a heading and the stack, to be appended to an error
// message.
std::string stack_trace_if_asked();

}  // namespace lockstep::base
