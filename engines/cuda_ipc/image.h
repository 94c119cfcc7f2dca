// The kernels as compiled by nvcc (kernels.cu, cmake/FindNvcc.cmake): machine code for some architectures and PTX for all others.
#pragma once

extern "C" __attribute__((visibility("hidden"))) const unsigned char lockstep_cuda_ipc_kernels[];

namespace lockstep::cuda_ipc {

// For cuModuleLoadData.
inline const void* kernel_image() {
  return lockstep_cuda_ipc_kernels;
}

}  // namespace lockstep::cuda_ipc
