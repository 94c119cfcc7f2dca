// The kernels that are compiled into the image of the plug-in; the loops are in element_loops.h.
#include "engines/cuda_ipc/element_loops.h"

namespace lockstep::cuda_ipc {
namespace {

__device__ __forceinline__ Share share_of_thread() {
  return {static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
          static_cast<std::uint64_t>(gridDim.x) * blockDim.x, blockIdx.y};
}

}  // namespace

#define LOCKSTEP_REDUCE_KERNEL(name, loop)                                                                          \
  extern "C" __global__ void __launch_bounds__(kBlockThreads) name(const __grid_constant__ ReduceTask task) { \
    loop(task, share_of_thread());                                                                                  \
  }
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_u8, reduce_integers<std::uint8_t>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_i8, reduce_integers<std::int8_t>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_i16, reduce_integers<std::int16_t>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_i32, reduce_integers<std::int32_t>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_i64, reduce_integers<std::int64_t>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_f16, reduce_floats<Half>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_bf16, reduce_floats<BrainHalf>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_f32, reduce_floats<Plain<float>>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_f64, reduce_floats<Plain<double>>)
LOCKSTEP_REDUCE_KERNEL(lockstep_reduce_bool, reduce_bools)

extern "C" __global__ void __launch_bounds__(kBlockThreads) lockstep_copy(const __grid_constant__ CopyTask task) {
  copy_piece(task, share_of_thread());
}

}  // namespace lockstep::cuda_ipc
