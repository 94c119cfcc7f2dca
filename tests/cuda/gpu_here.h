// Whether this machine can run tests that need a GPU. For tests only.
#pragma once

#include <string>

namespace lockstep::cuda {

// "": there is a device. Else one line that says why not, as tools/skips.txt expects it. Asks in a process of its own: CUDA
// that was started before a fork does not work after it. Pre: this process has one thread.
std::string why_no_gpu();

}  // namespace lockstep::cuda
