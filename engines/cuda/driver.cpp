#include "engines/cuda/driver.h"

#include <dlfcn.h>

namespace lockstep::cuda {
namespace {

struct Found {
  Driver driver{};
  std::string why;  // empty: the driver can be used
};

// Never unloaded: the driver has threads, and handlers that run at exit.
Found load() {
  Found found;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    found.why = std::string("the CUDA driver is not there: ") + (text != nullptr ? text : "dlopen failed");
    return found;
  }
#define LOCKSTEP_CUDA_LOAD(member, symbol, arguments)                                       \
  found.driver.member = reinterpret_cast<decltype(Driver::member)>(dlsym(library, symbol)); \
  if (found.driver.member == nullptr && found.why.empty())                                  \
    found.why = "the CUDA driver is too old: libcuda.so.1 has no " symbol;
  LOCKSTEP_CUDA_ENTRIES(LOCKSTEP_CUDA_LOAD)
#undef LOCKSTEP_CUDA_LOAD
#define LOCKSTEP_CUDA_TRY(member, symbol, arguments) \
  found.driver.member = reinterpret_cast<decltype(Driver::member)>(dlsym(library, symbol));
  LOCKSTEP_CUDA_OPTIONAL_ENTRIES(LOCKSTEP_CUDA_TRY)
#undef LOCKSTEP_CUDA_TRY
  if (!found.why.empty()) return found;
  if (const Result result = found.driver.init(0); result != kSuccess)
    found.why = "the CUDA driver does not start: cuInit: " + describe(found.driver, result);
  return found;
}

}  // namespace

const Driver* Driver::find(std::string* why) {
  static const Found* const found = new Found(load());  // never destroyed: threads may use it during exit
  if (found->why.empty()) return &found->driver;
  if (why != nullptr) *why = found->why;
  return nullptr;
}

std::string describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != kSuccess || name == nullptr)
    return "CUDA error " + std::to_string(static_cast<int>(result));
  std::string all = name;
  if (driver.get_error_string(result, &text) == kSuccess && text != nullptr) all += std::string(": ") + text;
  return all;
}

bool is_sticky(Result result) {
  switch (result) {
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidPc:
    case kLaunchFailed:
    case kMpsClientTerminated:
    case kExternalDevice:
    case kUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace lockstep::cuda
