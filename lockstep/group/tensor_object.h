// Tensors inside objects (lockstep/object/object.h): include this to encode and decode at::Tensor.
//
// A tensor arrives with its dtype, sizes and requires_grad, contiguous whatever its strides were, as a leaf with no
// history, and on the device it was on: a tensor of cuda:3 is restored on cuda:3, which makes a context there. Move
// tensors to the CPU before sending where that is not wanted. An undefined tensor stays undefined.
// Raises kUnsupported for sparse, quantized and meta tensors, and on arrival for a device that is not there.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/object/object.h"

namespace lockstep::object {

template <>
struct Codec<at::Tensor> {
  static std::string name() { return "tensor"; }
  static void write(Encoder& encoder, const at::Tensor& tensor);
  static void read(Decoder& decoder, at::Tensor& out);
};

}  // namespace lockstep::object
