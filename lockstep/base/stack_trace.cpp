#include "lockstep/base/stack_trace.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "lockstep/base/environment.h"

namespace lockstep {
namespace {

std::string file_name(const char* path) {
  const std::string text = path == nullptr ? "?" : path;
  return text.substr(text.rfind('/') + 1);
}

void write_frame(std::ostream& out, void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0) {
    out << address;
    return;
  }
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (info.dli_sname != nullptr) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> readable(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), &std::free);
    out << (status == 0 ? readable.get() : info.dli_sname) << " +0x"
        << at - reinterpret_cast<std::uintptr_t>(info.dli_saddr) << ' ';
  }
  out << '(' << file_name(info.dli_fname) << "+0x" << at - reinterpret_cast<std::uintptr_t>(info.dli_fbase)
      << ')';
}

}  // namespace

std::string stack_trace(int skip) {
  constexpr int kFrames = 64;
  void* frames[kFrames];
  const int n = ::backtrace(frames, kFrames);
  std::ostringstream out;
  out << std::hex;
  for (int i = 1 + skip, number = 0; i < n; ++i, ++number) {
    out << '#' << std::dec << number << std::hex << ' ';
    write_frame(out, frames[i]);
    out << '\n';
  }
  return out.str();
}

std::string stack_trace_if_asked() {
  if (!environment_flag(Var::kShowCppStacktraces)) return "";
  return "\nC++ stack, innermost first:\n" + stack_trace(1);
}

}  // namespace lockstep
