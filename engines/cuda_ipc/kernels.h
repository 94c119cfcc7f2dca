// The kernels of the engine: what they are called in the image and which arguments they take. Compiled by nvcc into the
// image (kernels.cu) and by the host's compiler into the fake driver's kernels (fake_kernels.cpp).
#pragma once

#include <cstdint>

namespace lockstep::cuda_ipc {

inline constexpr int kMaxRanks = 32;
inline constexpr int kMaxPieces = 96;  // of one copy launch: arguments are limited to 4 KiB

// Reduces `count` elements of every source, in the order of the sources, and stores the result to the targets. The grid's
// y-th row works on part y: part_bytes further in every source; with `scatter` its only target is the y-th, else all.
// A target may be the same memory as a source.
struct ReduceTask {
  const void* from[kMaxRanks];
  void* to[kMaxRanks];
  std::uint64_t count;
  std::uint64_t part_bytes;
  double scale;  // of a finished sum; 1 unless averaging
  std::uint32_t n_from;
  std::uint32_t n_to;
  std::uint32_t op;  // lockstep_reduce_op
  std::uint32_t scatter;
};

struct CopyPiece {
  const void* from;
  void* to;
  std::uint64_t n_bytes;
};
// The grid's y-th row copies the y-th piece. Pieces do not overlap, except that from may equal to.
struct CopyTask {
  CopyPiece pieces[kMaxPieces];
};
static_assert(sizeof(ReduceTask) <= 4096 && sizeof(CopyTask) <= 4096);

inline constexpr unsigned kBlockThreads = 256;
inline constexpr unsigned kVectorBytes = 16;
inline constexpr unsigned kUnrolled = 4;  // vectors that a thread has in flight

// One reduction per element type, by lockstep_dtype; the last is the copy.
inline constexpr const char* kKernelNames[] = {
    "lockstep_reduce_u8",  "lockstep_reduce_i8",   "lockstep_reduce_i16",  "lockstep_reduce_i32",
    "lockstep_reduce_i64", "lockstep_reduce_f16",  "lockstep_reduce_bf16", "lockstep_reduce_f32",
    "lockstep_reduce_f64", "lockstep_reduce_bool", "lockstep_copy"};
inline constexpr int kKernels = sizeof kKernelNames / sizeof *kKernelNames;
inline constexpr int kCopyKernel = kKernels - 1;

}  // namespace lockstep::cuda_ipc
