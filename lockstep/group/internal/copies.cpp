#include "lockstep/group/internal/copies.h"

#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>

// Not in a namespace and not inline: the note below names it. 1 while this copy has a default group of the
// process.
extern "C" {
__attribute__((visibility("hidden"), used)) std::atomic<std::uint32_t> lockstep_copy_in_use{0};
}

// The note: owner "lockstep", type 1, and how far behind its own address the word is. Resolved by the linker,
// so that no relocation and no exported symbol is needed.
asm(".pushsection .note.lockstep,\"a\",%note\n"
    ".balign 4\n"
    ".long 9, 4, 1\n"
    ".asciz \"lockstep\"\n"
    ".balign 4\n"
    ".long lockstep_copy_in_use - .\n"
    ".popsection\n");

namespace lockstep::internal {
namespace {

using InUse = std::atomic<std::uint32_t>;
constexpr char kOwner[] = "lockstep";
constexpr ElfW(Word) kType = 1;

std::size_t aligned(std::size_t n) {
  return (n + 3) / 4 * 4;
}

// The word of the copy in one note segment; null when it holds none of ours.
const InUse* find_word(const char* at, const char* end) {
  while (end - at >= static_cast<std::ptrdiff_t>(sizeof(ElfW(Nhdr)))) {
    ElfW(Nhdr) head;
    std::memcpy(&head, at, sizeof head);
    const char* const owner = at + sizeof head;
    const std::size_t length = aligned(head.n_namesz) + aligned(head.n_descsz);
    if (length > static_cast<std::size_t>(end - owner)) return nullptr;
    const bool ours = head.n_type == kType && head.n_namesz == sizeof kOwner && head.n_descsz == 4 &&
                      std::memcmp(owner, kOwner, sizeof kOwner) == 0;
    if (ours) {
      const char* const offset_at = owner + aligned(head.n_namesz);
      std::int32_t offset = 0;
      std::memcpy(&offset, offset_at, sizeof offset);
      return reinterpret_cast<const InUse*>(offset_at + offset);
    }
    at = owner + length;
  }
  return nullptr;
}

std::string path_of(const char* name) {
  if (name != nullptr && *name != '\0') return name;
  char path[4096];
  const auto length = ::readlink("/proc/self/exe", path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "the program";
}

struct Search {
  bool own;  // this copy's object, else another one that is in use
  std::string found{};
};

int look_at(dl_phdr_info* object, std::size_t, void* context) {
  auto& search = *static_cast<Search*>(context);
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    // Notes of other alignments have another layout, and are not ours.
    if (segment.p_type != PT_NOTE || segment.p_align > 4) continue;
    const auto* begin = reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
    const InUse* const word = find_word(begin, begin + segment.p_memsz);
    if (word == nullptr) continue;
    const bool own = word == &lockstep_copy_in_use;
    if (own != search.own || (!own && word->load() == 0)) continue;
    search.found = path_of(object->dlpi_name);
    return 1;
  }
  return 0;
}

std::string find_copy(bool own) {
  Search search{.own = own};
  ::dl_iterate_phdr(&look_at, &search);
  return search.found;
}

}  // namespace

void note_process_world(bool entered) {
  lockstep_copy_in_use.store(entered ? 1 : 0);
}

std::string other_copy_in_use() {
  return find_copy(false);
}

std::string this_copy() {
  return find_copy(true);
}

}  // namespace lockstep::internal
