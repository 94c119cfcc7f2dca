#include "lockstep/parallel/state_dict.h"

#include <c10/core/GradMode.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/dtensor.h"

namespace lockstep {
namespace {

// Parameters, then buffers; undefined ones (a Linear without bias) have nothing to save.
StateDict tensors_of(const torch::nn::Module& module) {
  StateDict all;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) all.insert(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) all.insert(item.key(), item.value());
  }
  return all;
}

template <class Get>
StateDict collect(const torch::nn::Module& module, Get get) {
  const c10::NoGradGuard no_grad;
  StateDict state;
  for (const auto& item : tensors_of(module)) {
    const auto plain = item.value().detach();
    state.insert(item.key(), is_dtensor(plain) ? get(plain) : plain);
  }
  return state;
}

template <class SizesOf>
void check_fits(const StateDict& tensors, const StateDict& state, const char* function, SizesOf sizes_of) {
  for (const auto& item : tensors) {
    const auto* const given = state.find(item.key());
    if (given == nullptr)
      base::raise(ErrorKind::kUsage, base::cat(function, ": the dict has no \"", item.key(), "\""));
    if (is_dtensor(*given))
      base::raise(ErrorKind::kUsage, base::cat(function, ": \"", item.key(), "\" of the dict is a DTensor"));
    const auto wanted = sizes_of(item.value());
    if (given->sizes() != at::IntArrayRef(wanted)) {
      base::raise(ErrorKind::kUsage,
                  base::cat(function, ": \"", item.key(), "\" has sizes ", given->sizes(), " in the dict, ",
                            at::IntArrayRef(wanted), " in the module: ", describe(item.value())));
    }
  }
  for (const auto& item : state) {
    if (!tensors.contains(item.key()))
      base::raise(ErrorKind::kUsage, base::cat(function, ": the module has no \"", item.key(), "\""));
  }
}

}  // namespace

StateDict local_state_dict(const torch::nn::Module& module) {
  return collect(module, [](const at::Tensor& dtensor) { return to_local(dtensor); });
}

StateDict full_state_dict(const torch::nn::Module& module) {
  return collect(module, [](const at::Tensor& dtensor) { return full_tensor(dtensor); });
}

void load_local_state_dict(torch::nn::Module& module, const StateDict& state) {
  const c10::NoGradGuard no_grad;
  const auto tensors = tensors_of(module);
  const auto local = [](const at::Tensor& tensor) {
    return is_dtensor(tensor) ? to_local(tensor.detach()) : tensor;
  };
  check_fits(tensors, state, "load_local_state_dict",
             [&](const at::Tensor& tensor) { return local(tensor).sizes().vec(); });
  for (const auto& item : tensors) {
    const auto& tensor = item.value();
    if (!is_dtensor(tensor)) {
      tensor.detach().copy_(state[item.key()]);
      continue;
    }
    local(tensor).copy_(state[item.key()]);
    tensor.unsafeGetTensorImpl()->bump_version();  // the piece has a version of its own
  }
}

void load_full_state_dict(torch::nn::Module& module, const StateDict& state) {
  const c10::NoGradGuard no_grad;
  const auto tensors = tensors_of(module);
  check_fits(tensors, state, "load_full_state_dict",
             [](const at::Tensor& tensor) { return tensor.sizes().vec(); });
  for (const auto& item : tensors) {
    const auto& tensor = item.value();
    const auto& whole = state[item.key()];
    tensor.detach().copy_(is_dtensor(tensor) ? distribute_tensor(whole.detach(), device_mesh(tensor),
                                                                 placements(tensor), {.src_data_rank = {}})
                                             : whole);
  }
}

}  // namespace lockstep
