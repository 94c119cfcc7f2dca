// Lists of tensors as the one buffer an engine wants, and back. Private to collective/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/collective/internal/collective_call.h"

namespace lockstep::internal {

// Elements of each tensor as the engine counts them.
std::vector<std::uint64_t> counts_of(const std::vector<at::Tensor>& list, Wire wire);
// The elements in one dimension and contiguous, complex numbers as pairs of reals or the other way round.
at::Tensor flat_as(const at::Tensor& tensor, at::ScalarType type);
// All have as many elements as the first.
bool have_one_size(const std::vector<at::Tensor>& list);

// The tensors are one contiguous tensor, cut along a dimension: the rows that each of them has a run of (1: the
// first dimension was cut, they are one after the other). 0 when they are not, when one is empty, and when
// runs are so short that copying them costs more than packing.
std::uint64_t rows_of(const std::vector<at::Tensor>& list);

// The tensors one after the other: their own memory when it has that form, else a copy.
at::Tensor packed(const std::vector<at::Tensor>& list);
// Where to put what belongs into `list`, one after the other: its own memory when it is so, else a
// temporary that `held` copies from. The list becomes the results.
at::Tensor room_for(const std::vector<at::Tensor>& list, bool use_temporary, HeldTensors& held);
// The same for one tensor.
at::Tensor room_for(const at::Tensor& output, bool use_temporary, HeldTensors& held);

// An all-gather of parts whose sizes may differ: `counts` elements of `send`'s type from each rank. Appends
// the operation to `ops` and returns where each rank's part will be, flat. `counts` must live until the
// operations start.
std::vector<at::Tensor> all_gather_parts(const CollectiveCall& call, const at::Tensor& send,
                                         const std::vector<std::uint64_t>& counts,
                                         std::vector<lockstep_op>& ops, HeldTensors& held);

}  // namespace lockstep::internal
