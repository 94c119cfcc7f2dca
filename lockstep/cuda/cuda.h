// GPUs of this process, for programs that are linked against libtorch_cpu alone, as lockstep's own targets are.
//
//   if (lockstep::cuda::load()) device = torch::Device("cuda:0");
//
// A program that links libtorch_cuda needs none of this. Everything else in lockstep finds GPUs through libtorch's
// device-generic interface, so that programs without one link, load and pay for nothing.
// Thread safety: every function may be called from any thread.
#pragma once

#include <string>

namespace lockstep::cuda {

// Loads libtorch_cuda, which stands beside the libtorch_cpu of this process, unless it is loaded. True when CUDA
// tensors can be made then: the library is there, and so are a driver and a GPU. Must come before anything asks
// libtorch for CUDA (torch::cuda::is_available, a tensor on "cuda"): libtorch remembers its first answer for ever.
// Takes up to a second the first time. `why`, if given, gets the reason of a false.
bool load(std::string* why = nullptr);

// The GPUs that this process sees (CUDA_VISIBLE_DEVICES); 0 before load() and without one.
int device_count() noexcept;

// The GPU that this thread's tensors are on when none is named. Raises kUsage for an index that does not exist.
void set_device(int index);

}  // namespace lockstep::cuda
