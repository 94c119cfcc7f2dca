#include "tests/fake_cuda/driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>

namespace fake_cuda {
namespace {

// "name:3=2,other:1=700" or "1=700": calls `each` with the text before '=' and the number after it.
template <class Each>
void for_each_setting(const char* text, const Each& each) {
  std::istringstream in(text == nullptr ? "" : text);
  for (std::string one; std::getline(in, one, ',');) {
    const auto equals = one.find('=');
    if (equals == std::string::npos) continue;
    each(one.substr(0, equals), std::atoi(one.c_str() + equals + 1));
  }
}

// Streams that still wait when the process ends stop waiting, so that their threads can be joined.
__attribute__((destructor)) void end_with_the_process() {
  Driver::get().end();
}

}  // namespace

std::vector<Device*>& contexts() {
  thread_local std::vector<Device*> stack;
  return stack;
}

Driver& Driver::get() {
  static Driver* const driver = new Driver;
  return *driver;
}

Driver::Driver() {
  read_environment();
}

void Driver::read_environment() {
  const char* const n = std::getenv("FAKE_CUDA_DEVICES");
  const int n_devices = n == nullptr ? 2 : std::atoi(n);
  for (int i = 0; i < n_devices; ++i) {
    devices_.push_back(std::make_unique<Device>());
    devices_.back()->index = i;
  }
  for_each_setting(std::getenv("FAKE_CUDA_BROKEN"), [&](const std::string& index, int result) {
    if (Device* const broken = device(std::atoi(index.c_str()))) broken->error = result;
  });
  for_each_setting(std::getenv("FAKE_CUDA_FAIL"), [&](const std::string& call, int result) {
    const auto colon = call.find(':');
    fail(call.substr(0, colon), colon == std::string::npos ? 1 : std::atoi(call.c_str() + colon + 1), result);
  });
  if (const char* const bytes = std::getenv("FAKE_CUDA_MEMORY"))
    memory.limit(std::strtoull(bytes, nullptr, 0));
  relaxed_ = std::getenv("FAKE_CUDA_RELAXED") != nullptr;
  if (const char* const path = std::getenv("FAKE_CUDA_KERNELS"); path != nullptr && *path != '\0') {
    kernels_library_ = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (kernels_library_ == nullptr) std::fprintf(stderr, "fake_cuda: FAKE_CUDA_KERNELS: %s\n", ::dlerror());
  }
}

CUresult Driver::enter(const char* name) {
  int failure = kSuccess;
  {
    const std::lock_guard lock(counts_mutex_);
    Counts& counts = counts_[name];
    const auto found = counts.failures.find(++counts.n_calls);
    if (found != counts.failures.end()) failure = found->second;
  }
  if (in_host_function()) return kNotPermitted;
  if (ending_) return kDeinitialized;
  if (owner_ != ::getpid()) return kNotInitialized;
  return static_cast<CUresult>(failure);
}

CUresult Driver::initialize() {
  {
    const std::lock_guard lock(counts_mutex_);
    Counts& counts = counts_["cuInit"];
    const auto found = counts.failures.find(++counts.n_calls);
    if (found != counts.failures.end()) return static_cast<CUresult>(found->second);
  }
  if (devices_.empty()) return kNoDevice;
  int nobody = 0;
  if (!owner_.compare_exchange_strong(nobody, ::getpid()) && owner_ != ::getpid()) return kNotInitialized;
  return kSuccess;
}

void Driver::fail(const std::string& entry, int nth, int result) {
  const std::lock_guard lock(counts_mutex_);
  Counts& counts = counts_[entry];
  counts.failures[counts.n_calls + static_cast<std::uint64_t>(nth)] = result;
}

std::uint64_t Driver::calls(const std::string& entry) {
  const std::lock_guard lock(counts_mutex_);
  return counts_[entry].n_calls;
}

Device* Driver::device(int index) {
  return index >= 0 && index < n_devices() ? devices_[static_cast<std::size_t>(index)].get() : nullptr;
}

Device* Driver::current(CUresult& error) {
  if (contexts().empty() || contexts().back() == nullptr) {
    error = kInvalidContext;
    return nullptr;
  }
  Device* const device = contexts().back();
  error = device->n_retained > 0 ? static_cast<CUresult>(device->error.load()) : kContextIsDestroyed;
  return error == kSuccess ? device : nullptr;
}

std::shared_ptr<Stream> Driver::stream(CUstream handle, CUresult& error) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 2) {  // null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
    Device* const device = current(error);
    if (device == nullptr) return nullptr;
    const std::lock_guard lock(streams_mutex_);
    if (!device->null_stream) device->null_stream = std::make_shared<Stream>(*device);
    return device->null_stream;
  }
  const std::lock_guard lock(streams_mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) {
    error = kInvalidHandle;
    return nullptr;
  }
  error = static_cast<CUresult>(found->second->device().error.load());
  return error == kSuccess ? found->second : nullptr;
}

CUstream Driver::add_stream(Device& device) {
  auto stream = std::make_shared<Stream>(device);
  std::vector<std::shared_ptr<Stream>> over;  // joined outside of the lock
  const std::lock_guard lock(streams_mutex_);
  std::erase_if(closed_, [&](const auto& one) {
    if (one->finished()) over.push_back(one);
    return one->finished();
  });
  streams_.emplace(stream.get(), stream);
  return stream.get();
}

CUresult Driver::remove_stream(CUstream handle) {
  const std::lock_guard lock(streams_mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return kInvalidHandle;
  found->second->close();
  closed_.push_back(std::move(found->second));
  streams_.erase(found);
  return kSuccess;
}

void Driver::drain(Device& device, const char* who) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(streams_mutex_);
    if (device.null_stream) all.push_back(device.null_stream);
    for (const auto& [handle, stream] : streams_) all.push_back(stream);
    all.insert(all.end(), closed_.begin(), closed_.end());
  }
  for (const auto& stream : all) {
    if (&stream->device() == &device) stream->drain(who);
  }
}

void Driver::end() {
  ending_ = true;
  if (owner_ != ::getpid()) return;  // forked: the threads are not here
  std::vector<std::shared_ptr<Stream>> all;
  const std::lock_guard lock(streams_mutex_);
  for (const auto& device : devices_) all.push_back(std::move(device->null_stream));
  for (auto& [handle, stream] : streams_) all.push_back(std::move(stream));
  streams_.clear();
  closed_.clear();
}

std::optional<Kernel> Driver::find_kernel(const std::string& name) {
  const std::lock_guard lock(mutex);
  if (const auto found = kernels.find(name); found != kernels.end()) return found->second;
  for (void* const library : {kernels_library_, static_cast<void*>(RTLD_DEFAULT)}) {
    auto* const run = reinterpret_cast<fake_cuda_kernel>(::dlsym(library, ("fake_kernel_" + name).c_str()));
    if (run == nullptr) continue;
    Kernel kernel{.run = run, .sizes = {}};
    const auto* size =
        static_cast<const std::size_t*>(::dlsym(library, ("fake_kernel_sizes_" + name).c_str()));
    for (; size != nullptr && *size != 0; ++size) kernel.sizes.push_back(*size);
    return kernel;
  }
  std::fprintf(stderr, "fake_cuda: there is no fake_kernel_%s (FAKE_CUDA_KERNELS)\n", name.c_str());
  return std::nullopt;
}

}  // namespace fake_cuda
