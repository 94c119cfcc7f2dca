// Memory that large gradients are made in: shared by all ranks, so that they are reduced where they lie, without a copy into
// a bucket.
//
// While a backward pass runs, an allocator placed before libtorch's serves requests whose size is that of a large
// gradient from a pool of the group's shared memory; autograd writes the gradient there and Tensor::grad() keeps it. A
// temporary of the same size may be stored there too, and does no harm. The life of one block:
//
//   (not made) --first request--> lent to a tensor --tensor freed, on any thread--> free --request--> lent ...
//                                       |
//                                       +--the pool is gone--> its own until it is freed, then the group's again
//
// Invariants: a block is lent to at most one tensor; of each size there are at most as many blocks as gradients, and two
// more. A gradient that outlives the model keeps its own block alive, and nothing else of the pool.
//
// The allocator is placed once per process and stays; outside of a backward pass that was announced it only passes
// requests on (one thread-local load). If the program later places another one, gradients are made elsewhere and copied.
// A gradient that was reduced in part when an operation failed is neither this rank's nor the average.
// Thread safety: blocks may be freed on any thread; everything else on the thread that runs backward(). The allocator's
// lock and the pool's are never held together.
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
  // For gradients of these sizes in bytes, one entry per gradient; at least one.
  static std::shared_ptr<GradientPool> create(Group group, const std::vector<std::size_t>& sizes);
  ~GradientPool() = default;
  GradientPool(const GradientPool&) = delete;
  GradientPool& operator=(const GradientPool&) = delete;

  // The backward pass that runs on this thread may use the pool, to its end or until close(). Call inside it. Nothing in a
  // forked child, whose free blocks are the parent's as well.
  void open();
  void close() noexcept;
  // An uninitialised tensor with the sizes, strides and type of `like`, which is dense: from the pool, or ordinary memory.
  at::Tensor make(const at::Tensor& like);
  // In blocks that nobody uses.
  std::size_t free_bytes() const;
  // True when the parameter's gradient has a whole block of this pool to itself, laid out as the parameter. `incoming` is
  // what autograd made, from which the gradient may have been taken without a copy, or undefined.
  bool holds_whole(const at::Tensor& gradient, const at::Tensor& parameter, const at::Tensor& incoming) const;

 private:
  friend class PoolAllocator;
  struct Block {
    at::Tensor memory;
    std::size_t n_bytes;
  };
  struct Size {
    std::size_t n_most;      // blocks there may be
    std::size_t n_made = 0;  // blocks there are
    std::vector<Block> free{};
  };
  GradientPool(Group group, const std::vector<std::size_t>& sizes);
  // Null: not a size for the pool, or none to be had.
  void* take(std::size_t n_bytes);
  void give_back(Block block);

  const Group group_;
  const int process_;
  const std::size_t smallest_;
  mutable std::mutex mutex_;
  std::map<std::size_t, Size> sizes_;  // guarded by mutex_; so are its entries
};

}  // namespace lockstep::internal
