#include "lockstep/ddp/internal/flat_views.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_complex.h>

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

FlatViews flat_views(const std::vector<at::Tensor>& like, const Group& group,
                     std::optional<at::ScalarType> other) {
  // Autograd's own views refuse detach_(), which torch::optim calls on every gradient in zero_grad().
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::ScalarType dtype = other.value_or(like.front().scalar_type());
  std::int64_t n_elements = 0;
  for (const at::Tensor& tensor : like) n_elements += tensor.numel();

  const EmptySharedOptions memory{.group = group, .device = like.front().device()};
  FlatViews made;
  at::Tensor typed;
  if (at::isComplexType(dtype)) {
    made.flat = empty_shared({2 * n_elements}, c10::toRealValueType(dtype), memory);
    typed = at::view_as_complex(made.flat.view({n_elements, 2}));
  } else {
    made.flat = empty_shared({n_elements}, dtype, memory);
    typed = made.flat;
  }
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : like) {
    made.views.push_back(
        tensor.is_non_overlapping_and_dense()
            ? typed.as_strided(tensor.sizes(), tensor.strides(), typed.storage_offset() + offset)
            : typed.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return made;
}

}  // namespace lockstep::internal
