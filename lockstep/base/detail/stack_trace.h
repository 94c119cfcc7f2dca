// The calling thread's C++ stack as text, for errors that people debug.
#pragma once

#include <string>

namespace lockstep::base {

// One line per frame, innermost first, without the frame of this function and `skip` above it: "#1 lockstep::barrier(...)
// +0x1f (train+0x41c3f)". Names are in the dynamic linker or in the file unless it is stripped. Not for signal handlers.
std::string stack_trace(int skip = 0);

// "" unless TORCH_SHOW_CPP_STACKTRACES is on; else a heading and the stack, to be put behind an error's message.
std::string stack_trace_if_asked();

}  // namespace lockstep::base
