// One tensor that holds a part per rank, concatenated on dimension 0, stacked, or flat. Private to
// collective/.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/collective/internal/collective_call.h"

namespace lockstep::internal {

// `whole` must hold one `part` per rank; raises kUsage.
void check_whole(const CollectiveCall& call, const at::Tensor& whole, const char* whole_role,
                 const at::Tensor& part, const char* part_role);

}  // namespace lockstep::internal
