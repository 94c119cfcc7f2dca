// Memory that large gradients are allocated in: shared by all ranks, so that they are reduced in place,
// without a copy into a bucket.
//
// While a backward pass runs, an allocator installed in front of libtorch's serves requests of a large
// gradient's size from a pool of the group's shared memory; autograd writes the gradient there and
// Tensor::grad() keeps it. A temporary of the same size may be stored there too, which is harmless. The life
// of one block:
//
//   (not made) --first request--> lent to a tensor --tensor freed, on any thread--> free --request--> lent ...
//                                       |
//                                       +--the pool is destroyed--> the tensor's until freed, then the group's again
//
// Invariants: a block is lent to at most one tensor; of each size there are at most two more blocks than
// gradients. A gradient that outlives the model keeps only its own block alive.
//
// Of gradients on a GPU there are no blocks: engines of device memory reduce any gradient where libtorch put it.
// The pool then only makes memory for gradients that do not exist, and tells whose memory is whose.
//
// The allocator is installed once per process and stays; outside an announced backward pass it only forwards
// requests (one thread-local load). If the program later installs another one, gradients are allocated
// elsewhere and copied. A gradient that was partly reduced when an operation failed is neither the local one
// nor the average. Thread safety: blocks may be freed on any thread; everything else on the thread that runs
// backward(). The allocator's lock and the pool's are never held together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep::internal {

class GradientPool final : public std::enable_shared_from_this<GradientPool> {
 public:
  // For gradients of these sizes in bytes, one entry per gradient, on a device; at least one.
  static std::shared_ptr<GradientPool> create(Group group, const std::vector<std::size_t>& sizes,
                                              c10::Device device = c10::kCPU);
  ~GradientPool() = default;
  GradientPool(const GradientPool&) = delete;
  GradientPool& operator=(const GradientPool&) = delete;

  // The backward pass running on this thread may use the pool, until its end or close(). Call inside it.
  // No-op in a forked child, whose free blocks are shared with the parent.
  void open();
  void close() noexcept;
  // An uninitialised tensor with the sizes, strides and type of `like`, which is dense: from the pool, or
  // ordinary memory.
  at::Tensor make(const at::Tensor& like);
  // Bytes in unused blocks.
  std::size_t free_bytes() const;
  // The gradient is a whole block of this pool, or a whole allocation on a GPU, and has the parameter's layout.
  bool holds(const at::Tensor& gradient, const at::Tensor& parameter) const;
  // And is its only user.
  // `incoming` is the tensor autograd produced, which the gradient may share, or undefined.
  bool holds_whole(const at::Tensor& gradient, const at::Tensor& parameter, const at::Tensor& incoming) const;

 private:
  friend class PoolAllocator;
  struct Block {
    at::Tensor memory;
    std::size_t n_bytes;
  };
  struct Size {
    std::size_t n_most;      // maximum number of blocks
    std::size_t n_made = 0;  // number of blocks
    std::vector<Block> free{};
  };
  GradientPool(Group group, const std::vector<std::size_t>& sizes, c10::Device device);
  // Null: not a size of the pool, or no block available.
  void* take(std::size_t n_bytes);
  void give_back(Block block);

  const Group group_;
  const c10::Device device_;
  const int process_;
  const std::size_t smallest_;
  mutable std::mutex mutex_;
  std::map<std::size_t, Size> sizes_;  // guarded by mutex_; so are its entries
};

}  // namespace lockstep::internal
