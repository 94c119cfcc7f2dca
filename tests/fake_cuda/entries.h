// What every file of exported entries begins with.
#pragma once

#include "tests/fake_cuda/driver.h"

// First line of an entry.
#define FAKE_CUDA_ENTER() \
  if (const CUresult entered = Driver::get().enter(__func__); entered != kSuccess) return entered
// First lines of one that needs a current context: declares `device`.
#define FAKE_CUDA_ENTER_DEVICE()                                        \
  FAKE_CUDA_ENTER();                                                    \
  CUresult error = kSuccess;                                            \
  [[maybe_unused]] Device* const device = Driver::get().current(error); \
  if (error != kSuccess) return error
// First lines of one that takes a stream: declares `queue`.
#define FAKE_CUDA_ENTER_STREAM(handle)                                       \
  FAKE_CUDA_ENTER();                                                         \
  CUresult error = kSuccess;                                                 \
  const std::shared_ptr<Stream> queue = Driver::get().stream(handle, error); \
  if (error != kSuccess) return error

#define FAKE_CUDA_API extern "C" FAKE_CUDA_EXPORT
