// Symbol tables as a linker writes them, and as nobody should. What the names are for: stack_trace in
// base_test.cpp.
#include <elf.h>
#include <gtest/gtest.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/internal/elf_symbols.h"

namespace lockstep::base::internal {
namespace {

using Bytes = std::vector<std::uint8_t>;

// A header, then sections: none, .symtab of `first` [0x1000, 0x1010), an object, `second` [0x1010, 0x1030),
// and .strtab.
struct SmallFile {
  ElfW(Ehdr) header{};
  ElfW(Shdr) sections[3]{};
  ElfW(Sym) symbols[4]{};
  char names[20] = "\0first\0second\0thing";

  SmallFile() {
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
    header.e_ident[EI_DATA] = ELFDATA2LSB;
    header.e_shoff = offsetof(SmallFile, sections);
    header.e_shentsize = sizeof(ElfW(Shdr));
    header.e_shnum = 3;
    sections[1].sh_type = SHT_SYMTAB;
    sections[1].sh_offset = offsetof(SmallFile, symbols);
    sections[1].sh_size = sizeof symbols;
    sections[1].sh_entsize = sizeof(ElfW(Sym));
    sections[1].sh_link = 2;
    sections[2].sh_type = SHT_STRTAB;
    sections[2].sh_offset = offsetof(SmallFile, names);
    sections[2].sh_size = sizeof names;
    symbols[1] = symbol(1, STT_FUNC, 0x1000, 0x10);
    symbols[2] = symbol(14, STT_OBJECT, 0x1010, 0x20);
    symbols[3] = symbol(7, STT_FUNC, 0x1010, 0x20);
  }

  static ElfW(Sym) symbol(unsigned name, unsigned char type, std::uint64_t at, std::uint64_t size) {
    ElfW(Sym) made{};
    made.st_name = name;
    made.st_info = static_cast<unsigned char>(ELF64_ST_INFO(STB_LOCAL, type));
    made.st_shndx = 1;
    made.st_value = at;
    made.st_size = size;
    return made;
  }

  Bytes bytes() const {
    Bytes all(sizeof *this);
    std::memcpy(all.data(), this, all.size());
    return all;
  }
};

std::vector<std::string> names_in(const Bytes& file, std::span<const std::uint8_t> image = {}) {
  const Fd memory(::memfd_create("elf", MFD_CLOEXEC));
  EXPECT_EQ(::write(memory.get(), file.data(), file.size()), static_cast<ssize_t>(file.size()));
  const std::uint64_t addresses[] = {0x0fff, 0x1000, 0x100f, 0x1010, 0x102f, 0x1030};
  std::vector<std::string> names;
  for (const auto& each : functions_at(cat("/proc/self/fd/", memory.get()), addresses, image)) {
    names.push_back(each.name);
  }
  return names;
}

const std::vector<std::string> kNone(6);

TEST(ElfSymbols, NameTheFunctionThatContainsAnAddress) {
  const auto names = names_in(SmallFile().bytes());
  EXPECT_EQ(names, (std::vector<std::string>{"", "first", "first", "second", "second", ""}));
}

TEST(ElfSymbols, AreNotTakenFromAFileThatWasReplaced) {
  const Bytes file = SmallFile().bytes();
  Bytes other = file;
  other[24] ^= 1;
  EXPECT_NE(names_in(file, std::span(file).first(100)), kNone);
  EXPECT_EQ(names_in(file, std::span(other).first(100)), kNone);
  EXPECT_TRUE(functions_at("/nonexistent", {}).empty());
}

TEST(ElfSymbols, OfAFileThatIsCutAnywhereAreFewerAtWorst) {
  const Bytes whole = SmallFile().bytes();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const auto names = names_in({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
    ASSERT_EQ(names.size(), kNone.size());
    if (length < offsetof(SmallFile, symbols)) {
      ASSERT_EQ(names, kNone) << length;
    }
  }
}

// Every byte of every table, with values that make sizes and offsets small, huge and negative.
TEST(ElfSymbols, OfADamagedFileAreReadSafely) {
  const Bytes whole = SmallFile().bytes();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const std::uint8_t value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
      Bytes file = whole;
      file[at] = value;
      for (const auto& name : names_in(file)) ASSERT_LE(name.size(), sizeof(SmallFile::names)) << at;
    }
  }
}

TEST(ElfSymbols, EndWithTheFileWhateverItsHeaderAnnounces) {
  SmallFile file;
  file.sections[1].sh_size = ~std::uint64_t{0};
  file.sections[2].sh_size = ~std::uint64_t{0};
  EXPECT_EQ(names_in(file.bytes())[1], "first");
  file.sections[1].sh_offset = ~std::uint64_t{0} - 8;
  EXPECT_EQ(names_in(file.bytes()), kNone);
}

}  // namespace
}  // namespace lockstep::base::internal
