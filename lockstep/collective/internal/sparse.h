// all_reduce of sparse COO tensors: every rank gathers all indices and values and adds them up itself, in the
// order of ranks, so that all get the same bits. Private to collective/.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

Work all_reduce_sparse(at::Tensor tensor, const AllReduceOptions& options);

}  // namespace lockstep::internal
