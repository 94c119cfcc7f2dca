// The statistics of a batch that is distributed over ranks, and normalisation with them.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/nn/internal/norm_route.h"

namespace lockstep::internal {

// Over all ranks' batches; bitwise equal on every rank.
struct BatchStatistics {
  double count = 0;     // values per channel
  at::Tensor mean;      // per channel, f64
  at::Tensor variance;  // biased
};

// Count, mean and sum of squared deviations of this rank's part, in one flat f64 tensor on `device`, which must be
// of one type on all ranks. Undefined `input`: an empty batch of `channels`.
at::Tensor describe_part(const at::Tensor& input, std::int64_t channels, c10::Device device);
// A buffer for all ranks' parts: one row each.
at::Tensor empty_parts(const at::Tensor& part, int n_ranks);
BatchStatistics combine_parts(const at::Tensor& parts);

// The backward message: two sums per channel.
at::Tensor empty_sums(std::int64_t channels, c10::Device device);

struct Affine {
  at::Tensor weight, bias;  // undefined: ones and zeros
};
// (input - mean) / sqrt(variance + eps) * weight + bias, differentiable. Its backward is a collective over
// `route`.
at::Tensor normalise(const at::Tensor& input, const Affine& affine, const BatchStatistics& statistics,
                     double eps, const NormRoute& route);

}  // namespace lockstep::internal
