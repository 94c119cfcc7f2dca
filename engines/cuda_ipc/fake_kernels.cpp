// The kernels for the fake driver (tests/fake_cuda): the same loops, compiled for the host, with a grid of one thread.
#include "engines/cuda_ipc/element_loops.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace lockstep::cuda_ipc {
namespace {

// Addresses of device memory become those of its contents.
template <class Pointer>
void translate(Pointer& pointer) {
  if (pointer != nullptr) pointer = static_cast<Pointer>(fake_cuda_host(pointer));
}

ReduceTask reduce_task(const fake_cuda_launch* launch) {
  ReduceTask task = *static_cast<const ReduceTask*>(launch->params[0]);
  for (unsigned s = 0; s < task.n_from; ++s) translate(task.from[s]);
  for (unsigned t = 0; t < task.n_to; ++t) translate(task.to[t]);
  return task;
}

}  // namespace

#define LOCKSTEP_FAKE_REDUCE(name, loop)                                                                \
  FAKE_CUDA_KERNEL(name, sizeof(ReduceTask)) {                                                          \
    const ReduceTask task = reduce_task(launch);                                                        \
    for (unsigned part = 0; task.count > 0 && part < launch->grid[1]; ++part) loop(task, {0, 1, part}); \
  }
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_u8, reduce_integers<std::uint8_t>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_i8, reduce_integers<std::int8_t>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_i16, reduce_integers<std::int16_t>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_i32, reduce_integers<std::int32_t>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_i64, reduce_integers<std::int64_t>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_f16, reduce_floats<Half>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_bf16, reduce_floats<BrainHalf>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_f32, reduce_floats<Plain<float>>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_f64, reduce_floats<Plain<double>>)
LOCKSTEP_FAKE_REDUCE(lockstep_reduce_bool, reduce_bools)

FAKE_CUDA_KERNEL(lockstep_copy, sizeof(CopyTask)) {
  CopyTask task = *static_cast<const CopyTask*>(launch->params[0]);
  for (unsigned part = 0; part < launch->grid[1]; ++part) {
    if (task.pieces[part].n_bytes == 0) continue;
    translate(task.pieces[part].from);
    translate(task.pieces[part].to);
    copy_piece(task, {0, 1, part});
  }
}

}  // namespace lockstep::cuda_ipc
