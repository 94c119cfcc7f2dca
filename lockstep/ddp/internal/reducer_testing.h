// The reducer's parts put together by hand, for tests of one of them alone.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/internal/reduction_pass.h"

namespace lockstep::internal::reducer_testing {

// Parameters of these many elements, named p0, p1, ...; gradients undefined.
inline NamedTensors parameters_of_sizes(const std::vector<std::int64_t>& sizes) {
  NamedTensors named;
  for (const std::int64_t size : sizes) {
    named.names.push_back("p" + std::to_string(named.names.size()));
    named.tensors.push_back(torch::ones({size}).requires_grad_());
  }
  return named;
}

// One bucket per parameter, the last one first; nothing in place unless said.
inline GradientBuckets::Options bucket_each(std::size_t in_place_bytes = SIZE_MAX) {
  return {.group = default_group(), .caps = {.cap_mb_list = {1e-6}}, .in_place_bytes = in_place_bytes};
}
// All in one bucket.
inline GradientBuckets::Options one_bucket(std::size_t in_place_bytes = SIZE_MAX) {
  return {.group = default_group(), .in_place_bytes = in_place_bytes};
}

struct Parts {
  Parts(NamedTensors named, const GradientBuckets::Options& options,
        GradientTransfer::Options transfer_options = {})
      : parameters(std::move(named)),
        buckets(parameters.tensors, options),
        transfer(parameters, buckets, transfer_options),
        exchange(buckets, timer, options.group, std::source_location::current()) {
    buckets.build_first(false);
  }

  const at::Tensor& parameter(std::size_t index) const { return parameters.tensors[index]; }
  void set_grad(std::size_t index, double value) const {
    parameter(index).mutable_grad() = torch::full_like(parameter(index), value).detach();
  }
  // Its gradient has this value throughout.
  bool grad_is(std::size_t index, double value) const {
    const at::Tensor& gradient = parameter(index).grad();
    return gradient.defined() && torch::equal(gradient, torch::full_like(gradient, value));
  }

  const NamedTensors parameters;
  StepTimer timer;
  GradField field;
  GradientBuckets buckets;
  GradientTransfer transfer;
  BucketExchange exchange;
};

// The kind of error and whether its message has `text`.
inline bool refuses(ErrorKind kind, const std::string& text, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const bool as_expected =
        error.kind() == kind && std::string(error.what()).find(text) != std::string::npos;
    if (!as_expected) ADD_FAILURE() << error.what();
    return as_expected;
  }
  return false;
}

}  // namespace lockstep::internal::reducer_testing
