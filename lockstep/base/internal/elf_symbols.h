// Function names from the symbol table (.symtab) of an ELF file: hidden and static functions, which the
// dynamic linker does not know, are found unless the file was stripped. Private to base/.
//
// The file is untrusted input: it may be truncated, corrupt or change while it is read. It is read, not
// mapped, so the worst case is that no names are found. Memory use does not grow with the file. Not
// async-signal-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep::base::internal {

struct FunctionAt {
  std::string name{};       // mangled; "" when unknown
  std::uint64_t begin = 0;  // address of the function
};

// One entry per address. Addresses are those in the file, before relocation. The file must begin with the
// bytes of `image` (what was mapped from it); otherwise it has been replaced since, and no name is returned.
std::vector<FunctionAt> functions_at(const std::string& path, std::span<const std::uint64_t> addresses,
                                     std::span<const std::uint8_t> image = {});

}  // namespace lockstep::base::internal
