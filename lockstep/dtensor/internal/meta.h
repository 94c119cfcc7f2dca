// The inside of a sharded tensor. To libtorch it is an ordinary tensor of the global sizes, without memory,
// whose dispatch key kKey sends every operator below autograd to dispatch.cpp; what is sharded is in its
// BackendMeta, which libtorch carries along in detach, shallow copies and set_data. See docs/design.md for
// why this key.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>

#include "lockstep/dtensor/detail/operand_style.h"
#include "lockstep/dtensor/internal/mesh_context.h"
#include "lockstep/group/work.h"

namespace lockstep::dtensor_internal {

// Below autograd and above every back end, no back end's own, in libtorch 2.11 to 2.15 used by nobody else.
// "Fake" was the other candidate; from 2.15 on libtorch uses that one itself. This is the only place that
// names the key.
inline constexpr auto kKey = c10::DispatchKey::CustomRNGKeyId;

// Carried by tensors with a style only, so that their operators are met above autograd. Below kKey everything
// passes it by.
inline constexpr auto kStyleKey = c10::DispatchKey::DeferredInit;

// Immutable but for what in-place operators write into the local tensor. Copies made by detach and set_data
// share it.
class Meta final : public c10::BackendMeta {
 public:
  Meta(at::Tensor local, std::shared_ptr<const MeshContext> mesh, const Layout* layout, bool lost_base,
       std::shared_ptr<const OperandStyle> style = {})
      : local_(std::move(local)),
        mesh_(std::move(mesh)),
        layout_(layout),
        lost_base_(lost_base),
        style_(std::move(style)) {}

  // This rank's piece. Waits for the collective that writes it; raises its error.
  const at::Tensor& local() const {
    if (pending_.load(std::memory_order_acquire)) wait();
    return local_;
  }
  const std::shared_ptr<const MeshContext>& mesh() const { return mesh_; }
  // One of mesh()'s.
  const Layout* layout() const { return layout_; }
  // The result of a view operator whose input had to be redistributed: it shares no memory with its base any
  // more, so that writing to it would be lost.
  bool lost_base() const { return lost_base_; }

  // How operators that take this tensor as their weight treat their other input and their result; null: not
  // at all.
  const std::shared_ptr<const OperandStyle>& style() const { return style_; }

  // `work` writes the local tensor. Before the tensor is given to anybody.
  void set_pending(Work work);

 private:
  void wait() const;

  const at::Tensor local_;
  const std::shared_ptr<const MeshContext> mesh_;
  const Layout* const layout_;
  const bool lost_base_;
  const std::shared_ptr<const OperandStyle> style_;
  // Acquire pairs with the release in wait(): a thread that sees false sees what the collective wrote.
  mutable std::atomic<bool> pending_{false};
  mutable Work work_;
};

inline bool is_sharded(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}
// Only for what is_sharded.
inline const Meta& meta_of(const at::Tensor& tensor) {
  return *static_cast<const Meta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// A sharded tensor without history. Sizes are the global ones; strides follow the order of the local
// tensor's.
at::Tensor wrap(at::Tensor local, at::IntArrayRef sizes, std::shared_ptr<const MeshContext> mesh,
                const Layout* layout, bool lost_base = false, Work pending = {},
                std::shared_ptr<const OperandStyle> style = {});

// Installs the kernels at kKey, once per process. Called before the first tensor is made.
void install_kernels();
// Part of it: makes sharded tensors known to the layers below (lockstep/tensor/detail/local_shard.h).
void install_sharded_tensors();

}  // namespace lockstep::dtensor_internal
