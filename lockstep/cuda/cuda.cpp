#include "lockstep/cuda/cuda.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <filesystem>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::cuda {
namespace {

// The folder of the libtorch_cpu that this process runs with; "" when it is linked statically.
std::filesystem::path libtorch_folder() {
  Dl_info info{};
  // Any symbol of libtorch_cpu or c10 that is not inline.
  const auto symbol = reinterpret_cast<const void*>(&c10::GetAllocator);
  if (::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

// RTLD_GLOBAL: its operators register themselves in libtorch_cpu's tables, and libraries loaded later resolve
// against it. Never closed.
std::string load_library() {
  const auto beside = libtorch_folder() / "libtorch_cuda.so";
  std::error_code ignored;
  const std::string path = std::filesystem::exists(beside, ignored) ? beside.string() : "libtorch_cuda.so";
  if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return "";
  return base::cat(path, " cannot be loaded: ", ::dlerror());
}

}  // namespace

bool load(std::string* why) {
  // Once per process: a second attempt would find what the first one found.
  static const std::string failure = c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? "" : load_library();
  if (!failure.empty()) {
    if (why != nullptr) *why = failure;
    return false;
  }
  if (device_count() > 0) return true;
  if (why != nullptr) *why = "no GPU, or no driver for it, on this machine";
  return false;
}

int device_count() noexcept {
  return internal::device_count(c10::kCUDA);
}

void set_device(int index) {
  const int n = device_count();
  if (index < 0 || index >= n) {
    base::raise(ErrorKind::kUsage, base::cat("cuda::set_device(", index, "): this process sees ", n, " GPUs",
                                             n == 0 ? "; call cuda::load() first" : ""));
  }
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice({c10::kCUDA, static_cast<c10::DeviceIndex>(index)});
}

}  // namespace lockstep::cuda
