// Tensors inside objects (lockstep/object/object.h): include this to encode and decode at::Tensor.
//
// A tensor arrives with its dtype, sizes, requires_grad, and its strides where it has no gaps (transposed, channels last), else
// contiguous; as a leaf with no history, and on the device it was on: a tensor of cuda:3 is restored on cuda:3, which makes a context there. Move
// tensors to the CPU before sending where that is not wanted. An undefined tensor stays undefined; a sparse COO tensor
// stays one. Bytes that came beside the object, and are the receiver's own, are not copied: the tensor lies in them.
// Raises kUnsupported for other layouts, quantized and meta tensors, and on arrival for a device that is not there.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/object/object.h"

namespace lockstep::object {

// Looks at the tensors that require gradients while this thread encodes or decodes them, in order: distributed autograd
// keeps their history across workers. Set for a thread by TensorScope::Use.
class TensorScope {
 public:
  virtual ~TensorScope() = default;
  virtual void on_write(const at::Tensor& tensor) = 0;
  // It required gradients where it was sent; here it does not yet. Without a scope it becomes a leaf that does.
  virtual void on_read(at::Tensor& tensor) = 0;

  // `scope` is this thread's while it lives.
  class Use {
   public:
    explicit Use(TensorScope* scope);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    TensorScope* const before_;
  };
};

template <>
struct Codec<at::Tensor> {
  static std::string name() { return "tensor"; }
  static void write(Encoder& encoder, const at::Tensor& tensor);
  static void read(Decoder& decoder, at::Tensor& out);
};

}  // namespace lockstep::object
