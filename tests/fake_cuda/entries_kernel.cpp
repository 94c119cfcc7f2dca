// Modules and kernels.
#include <cstring>
#include <optional>

#include "tests/fake_cuda/entries.h"

using namespace fake_cuda;

namespace {

// A fatbin, its wrapper, a cubin, or PTX.
bool looks_like_an_image(const void* image) {
  std::uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  const char* const text = static_cast<const char*>(image);
  return magic == 0xba55ed50 || magic == 0x466243b1 || std::memcmp(text, "\177ELF", 4) == 0 ||
         std::memcmp(text, "//", 2) == 0 || std::memcmp(text, ".ver", 4) == 0;
}

// What a launch holds until it has run: copies of the arguments.
struct Launch {
  fake_cuda_launch as_given{};
  std::vector<std::vector<std::byte>> arguments;
  std::vector<void*> pointers;
  std::vector<std::byte> data;
};

CUresult copy_arguments(const Kernel& kernel, void** params, void** extra, Launch& launch) {
  if (params != nullptr && extra != nullptr) return kInvalidValue;
  if (extra != nullptr) {
    const void* data = nullptr;
    std::size_t n_bytes = 0;
    for (; reinterpret_cast<std::uintptr_t>(*extra) != kLaunchParamEnd; extra += 2) {
      if (reinterpret_cast<std::uintptr_t>(extra[0]) == kLaunchParamBufferPointer) data = extra[1];
      if (reinterpret_cast<std::uintptr_t>(extra[0]) == kLaunchParamBufferSize)
        n_bytes = *static_cast<std::size_t*>(extra[1]);
    }
    if (data == nullptr) return kInvalidValue;
    const auto* const bytes = static_cast<const std::byte*>(data);
    launch.data.assign(bytes, bytes + n_bytes);
    return kSuccess;
  }
  if (params == nullptr && !kernel.sizes.empty()) return kInvalidValue;
  for (std::size_t i = 0; i < kernel.sizes.size(); ++i) {
    const auto* const bytes = static_cast<const std::byte*>(params[i]);
    launch.arguments.emplace_back(bytes, bytes + kernel.sizes[i]);
  }
  for (auto& argument : launch.arguments) launch.pointers.push_back(argument.data());
  return kSuccess;
}

}  // namespace

FAKE_CUDA_API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  FAKE_CUDA_ENTER_DEVICE();
  if (out == nullptr || image == nullptr) return kInvalidValue;
  if (!looks_like_an_image(image)) return kInvalidImage;
  auto module = std::make_shared<Module>();
  *out = module.get();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  driver.modules.emplace(module.get(), std::move(module));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuModuleUnload(CUmodule handle) {
  FAKE_CUDA_ENTER_DEVICE();
  Driver::get().block_as_the_real_one(*device, __func__);
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  return driver.modules.erase(handle) == 1 ? kSuccess : kInvalidHandle;
}

FAKE_CUDA_API CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  FAKE_CUDA_ENTER_DEVICE();
  Driver& driver = Driver::get();
  const auto kernel = driver.find_kernel(name);
  const std::lock_guard lock(driver.mutex);
  const auto found = driver.modules.find(handle);
  if (found == driver.modules.end()) return kInvalidHandle;
  if (!kernel) return kNotFound;
  auto& function = found->second->functions[name];
  if (!function) {
    function = std::make_unique<Function>();
    function->name = name;
    function->kernel = *kernel;
  }
  *out = function.get();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuFuncLoad(CUfunction handle) {
  FAKE_CUDA_ENTER_DEVICE();
  Driver::get().block_as_the_real_one(*device, __func__);
  static_cast<Function*>(handle)->loaded = true;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                      unsigned block_x, unsigned block_y, unsigned block_z,
                                      unsigned shared_bytes, CUstream stream, void** params, void** extra) {
  FAKE_CUDA_ENTER_STREAM(stream);
  auto* const function = static_cast<Function*>(handle);
  if (function == nullptr) return kInvalidHandle;
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || block_y == 0 || block_z == 0)
    return kInvalidValue;
  if (block_x * block_y * block_z > 1024 || grid_y > 65535 || grid_z > 65535) return kInvalidValue;
  Device& device = queue->device();
  // A kernel is loaded by its first launch, for which the real driver waits until the device is idle.
  if (!function->loaded.exchange(true))
    Driver::get().block_as_the_real_one(device, "the first cuLaunchKernel");
  const auto launch = std::make_shared<Launch>();
  launch->as_given = {.grid = {grid_x, grid_y, grid_z},
                      .block = {block_x, block_y, block_z},
                      .shared_bytes = shared_bytes,
                      .params = nullptr,
                      .data = nullptr,
                      .device = device.index};
  if (const CUresult result = copy_arguments(function->kernel, params, extra, *launch); result != kSuccess)
    return result;
  launch->as_given.params = launch->pointers.empty() ? nullptr : launch->pointers.data();
  launch->as_given.data = launch->data.empty() ? nullptr : launch->data.data();
  queue->push({"a kernel", nullptr, [run = function->kernel.run, launch] { run(&launch->as_given); }});
  return kSuccess;
}
