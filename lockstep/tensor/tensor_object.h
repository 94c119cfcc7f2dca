// Tensors inside objects (lockstep/object/object.h): include this to encode and decode at::Tensor.
//
// A decoded tensor keeps its dtype, sizes and requires_grad, and its strides if they have no gaps
// (transposed, channels last); otherwise it is contiguous. It is a leaf without history on the device it came
// from: a tensor of cuda:3 is restored on cuda:3, which creates a context there. Move tensors to the CPU
// before sending to avoid that. In a message between workers (object/detail/device_transit.h) device maps say where it goes
// instead, and copies are asynchronous. Undefined and sparse COO tensors are preserved. Bytes received beside the
// object that the receiver owns are not copied: they become the tensor's storage. Raises kUnsupported for
// other layouts, quantized and meta tensors, and when decoding for a device that does not exist.
// Thread safety: no shared state; a TensorScope applies to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/object/object.h"

namespace lockstep::object {

// Called for tensors that require gradients while this thread encodes or decodes them, in order: distributed
// autograd records their history across workers. Set for a thread by TensorScope::Use.
class TensorScope {
 public:
  virtual ~TensorScope() = default;
  virtual void on_write(const at::Tensor& tensor) = 0;
  // The tensor required gradients at the sender but does not yet here. Without a scope it becomes a leaf that
  // does.
  virtual void on_read(at::Tensor& tensor) = 0;

  // Makes `scope` this thread's for its lifetime.
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
