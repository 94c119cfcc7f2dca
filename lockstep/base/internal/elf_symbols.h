// Function names from the symbol table (.symtab) of an ELF file: what the dynamic linker does not know, because it is
// hidden or static, is there unless the file was stripped. Private to base/.
//
// The file is input: it may be truncated, damaged or change while it is read. It is read and not mapped, so the worst is
// that there are no names. Memory does not grow with the file. Not for signal handlers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep::base::internal {

struct FunctionAt {
  std::string name{};       // mangled; "": not known
  std::uint64_t begin = 0;  // where the function begins
};

// One entry per address, which are addresses as the file has them, before it is loaded somewhere. `image` are bytes that
// the file must begin with, such as what was mapped from it: else it has been replaced since, and nothing is known.
std::vector<FunctionAt> functions_at(const std::string& path, std::span<const std::uint64_t> addresses,
                                     std::span<const std::uint8_t> image = {});

}  // namespace lockstep::base::internal
