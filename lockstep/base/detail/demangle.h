// The names of C++ types as one writes them.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace lockstep::base {

// Of a type_info's name(): "std::vector<int, std::allocator<int> >". What cannot be read stays as it is.
inline std::string demangle(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                    std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace lockstep::base
