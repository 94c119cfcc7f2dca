// Demangled names of C++ types. Thread safety: any thread.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace lockstep::base {

// Demangles type_info::name(): "std::vector<int, std::allocator<int> >". Returns `name` unchanged when it is
// not a mangled name.
inline std::string demangle(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                    std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace lockstep::base
