// A weight that says how the operator using it is to treat the activations around it: modules call
// linear, embedding, layer_norm and rms_norm with plain tensors and know nothing of meshes, and C++ modules
// have no forward hooks. For parallel/. Thread safety: values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/dtensor/placement.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

struct OperandStyle {
  // The operators that heed it: a table that is also used in a product (tied weights) is there a tensor
  // without a style. kTable changes nothing around any operator: it marks a table whose rows are cut, so that
  // embeddings of it compute the gradient of a rank's own rows only (internal/embedding.h).
  enum class Kind : std::uint8_t { kLinear, kEmbedding, kNorm, kTable };
  Kind kind = Kind::kLinear;
  Placements input;          // of a plain input; a DTensor has its own
  Placements desired_input;  // before the operator
  Placements output;         // after it
  bool use_local_output = true;
};

// The same tensor with a style. The operator with it as its weight takes a plain input as `input`,
// redistributes it to `desired_input`, its result to `output`, and returns the local tensor if asked to.
// torch::nn::Linear is not one operator: it transposes its weight (the transpose has the style too),
// multiplies (addmm, matmul), and adds the bias afterwards; to a local product a bias with a style is added
// as the piece that belongs to the style's `output`. Everything else treats the tensor as one without a
// style. Autograd records all of it. kUsage for plain tensors.
at::Tensor with_style(const at::Tensor& dtensor, OperandStyle style);

// The two halves of it, for what is no single operator. A tensor that is placed as asked is returned as it
// is. `features`: the whole size of the input's last dimension where it is known; pieces of a plain input may
// then be uneven.
at::Tensor prepare_operand(const at::Tensor& input, const DeviceMesh& mesh, const OperandStyle& style,
                           std::optional<std::int64_t> features = {});
at::Tensor finish_operand(const at::Tensor& output, const OperandStyle& style);

}  // namespace lockstep
