#include "lockstep/base/internal/elf_symbols.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "lockstep/base/detail/fd.h"

namespace lockstep::base::internal {
namespace {

constexpr unsigned char kNativeClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
constexpr unsigned char kNativeData = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
constexpr std::size_t kNameCapacity = 4096;  // longer ones are truncated
constexpr std::size_t kBlock = 1024;         // symbols read at a time

// Returns the bytes read, fewer than requested at the end of the file. Offsets come from the file: any value
// is harmless.
std::size_t read_at(int fd, std::uint64_t offset, void* to, std::size_t n_bytes) {
  std::size_t got = 0;
  while (got < n_bytes) {
    const auto at = static_cast<off_t>(offset + got);
    if (at < 0) break;
    const ssize_t n = ::pread(fd, static_cast<char*>(to) + got, n_bytes - got, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    got += static_cast<std::size_t>(n);
  }
  return got;
}

bool begins_with(int fd, std::span<const std::uint8_t> image) {
  std::vector<std::uint8_t> bytes(image.size());
  return read_at(fd, 0, bytes.data(), bytes.size()) == bytes.size() && std::ranges::equal(bytes, image);
}

struct SymbolTable {
  ElfW(Shdr) symbols{};
  ElfW(Shdr) names{};
};

std::optional<SymbolTable> find_table(int fd) {
  ElfW(Ehdr) header;
  if (read_at(fd, 0, &header, sizeof header) != sizeof header) return std::nullopt;
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != kNativeClass ||
      header.e_ident[EI_DATA] != kNativeData || header.e_shentsize != sizeof(ElfW(Shdr)))
    return std::nullopt;
  std::vector<ElfW(Shdr)> sections(header.e_shnum);  // at most 65535
  const std::size_t n_bytes = sections.size() * sizeof(ElfW(Shdr));
  if (read_at(fd, header.e_shoff, sections.data(), n_bytes) != n_bytes) return std::nullopt;
  for (const auto& section : sections) {
    if (section.sh_type != SHT_SYMTAB || section.sh_entsize != sizeof(ElfW(Sym)) ||
        section.sh_link >= sections.size())
      continue;
    return SymbolTable{.symbols = section, .names = sections[section.sh_link]};
  }
  return std::nullopt;
}

// A name may be truncated by the end of its table, by the end of the file, or by kNameCapacity.
std::string read_name(int fd, const ElfW(Shdr) & names, std::uint64_t at) {
  if (at >= names.sh_size) return "";
  char text[kNameCapacity];
  const std::size_t n =
      read_at(fd, names.sh_offset + at, text, std::min<std::uint64_t>(sizeof text, names.sh_size - at));
  return {text, ::strnlen(text, n)};
}

bool is_function(const ElfW(Sym) & symbol) {
  const auto type = ELF64_ST_TYPE(symbol.st_info);  // the same in 32 bits
  return (type == STT_FUNC || type == STT_GNU_IFUNC) && symbol.st_shndx != SHN_UNDEF && symbol.st_name != 0;
}

}  // namespace

std::vector<FunctionAt> functions_at(const std::string& path, std::span<const std::uint64_t> addresses,
                                     std::span<const std::uint8_t> image) {
  std::vector<FunctionAt> found(addresses.size());
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file || !begins_with(file.get(), image)) return found;
  const auto table = find_table(file.get());
  if (!table) return found;
  std::vector<ElfW(Sym)> block(kBlock);
  const std::uint64_t n_symbols = table->symbols.sh_size / sizeof(ElfW(Sym));
  // Stops at the end of the file, whatever its headers claim.
  for (std::uint64_t first = 0; first < n_symbols; first += block.size()) {
    block.resize(std::min<std::uint64_t>(kBlock, n_symbols - first));
    const std::size_t n = read_at(file.get(), table->symbols.sh_offset + first * sizeof(ElfW(Sym)),
                                  block.data(), block.size() * sizeof(ElfW(Sym))) /
                          sizeof(ElfW(Sym));
    for (const auto& symbol : std::span(block).first(n)) {
      if (!is_function(symbol)) continue;
      for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (!found[i].name.empty() || addresses[i] - symbol.st_value >= symbol.st_size) continue;
        found[i] = {.name = read_name(file.get(), table->names, symbol.st_name), .begin = symbol.st_value};
      }
    }
    if (n < block.size()) break;
  }
  return found;
}

}  // namespace lockstep::base::internal
