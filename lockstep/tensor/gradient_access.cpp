#include "lockstep/tensor/gradient_access.h"

#include <atomic>

namespace lockstep {
namespace {

// Release and acquire: a thread that sees the provider sees it constructed.
std::atomic<const GradientProvider*> installed_provider{nullptr};

}  // namespace

const GradientProvider* set_gradient_provider(const GradientProvider* provider) noexcept {
  return installed_provider.exchange(provider, std::memory_order_acq_rel);
}

std::shared_ptr<GradientAccess> current_gradients() {
  const auto* const provider = installed_provider.load(std::memory_order_acquire);
  return provider == nullptr ? nullptr : provider->current();
}

bool in_redirected_backward() noexcept {
  const auto* const provider = installed_provider.load(std::memory_order_acquire);
  return provider != nullptr && provider->in_backward();
}

}  // namespace lockstep
