// Communication hooks: replace the averaging of a bucket of gradients.
//
//   model->register_comm_hook({.run = [group = default_group()](GradBucket& bucket) {
//     return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .group = group, .async_op = true})
//         .get_future();
//   }});
//
// A hook is called on the thread that runs backward(), once per bucket and step, in the same order on all
// ranks, as soon as the bucket is full. Operations it starts overlap with the rest of backward(). Its future
// is awaited at the end of backward(), for the group's timeout at most, and must hold one tensor with the
// bucket's number of elements: the gradients that every rank receives. The buffer holds local gradients, not
// yet divided by the number of ranks: the hook must divide.
// Thread safety: hooks and GradBucket are used on the thread that runs backward(); the free functions from
// any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

// One bucket, as a hook sees it. Valid until the hook returns; its tensors may be kept until the hook's
// future completes.
class GradBucket {
 public:
  GradBucket(std::size_t index, at::Tensor buffer, std::span<const at::Tensor> gradients,
             std::vector<at::Tensor> parameters, bool is_last)
      : index_(index),
        buffer_(std::move(buffer)),
        gradients_(gradients),
        parameters_(std::move(parameters)),
        is_last_(is_last) {}

  // 0 is reduced first.
  std::size_t index() const { return index_; }
  // 1-D, all gradients of the bucket concatenated; complex ones as pairs of reals.
  const at::Tensor& buffer() const { return buffer_; }
  // Replaces the buffer by one with the same number of elements: what later hooks of a chain see.
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  // One per parameter, views of the original buffer in the parameter's shape.
  std::span<const at::Tensor> gradients() const { return gradients_; }
  // Of sharded ones this rank's pieces.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // The last bucket of this step.
  bool is_last() const { return is_last_; }

 private:
  std::size_t index_;
  at::Tensor buffer_;
  std::span<const at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
  bool is_last_;
};

using GradFuture = c10::intrusive_ptr<c10::ivalue::Future>;

struct CommHook {
  std::function<GradFuture(GradBucket&)> run;
  std::string name = "user hook";  // for messages and the log
};

// Options of the library's hooks (hooks.h).
struct CommHookOptions {
  Group group{};  // null: the default group of the thread that creates the hook
};

// A completed future that holds `tensor`.
GradFuture ready_future(at::Tensor tensor);

}  // namespace lockstep
