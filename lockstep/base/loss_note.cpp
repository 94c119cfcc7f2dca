#include "lockstep/base/detail/loss_note.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/numbers.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

// A slot is written by one pwrite of its worker and normally read after that worker has died. A torn read of
// a slot being written can garble the text but never the lengths.
struct Slot {
  std::int64_t pid = 0;  // the writer's own pid; 0: unused
  std::uint32_t length = 0;
  char text[500] = {};
};
static_assert(sizeof(Slot) == 512);

std::optional<Slot> read_slot(int fd, int index) {
  Slot slot;
  const auto at = static_cast<off_t>(sizeof slot) * index;
  if (::pread(fd, &slot, sizeof slot, at) != static_cast<ssize_t>(sizeof slot)) return std::nullopt;
  slot.length = std::min<std::uint32_t>(slot.length, sizeof slot.text);
  return slot;
}

std::string text_of(const Slot& slot) {
  return std::string(slot.text, slot.length);
}

// The slot in which this process writes its notes.
struct NoteRef {
  int fd = -1;
  int index = -1;
};

// A program that closed inherited descriptors may have reused the number for another file: compare the inode.
std::optional<NoteRef> own_slot() noexcept {
  try {
    const auto value = environment(EnvVar::kLockstepNotes);
    if (!value) return std::nullopt;
    NoteRef own;
    ino_t inode = 0;
    if (!read_numbers(*value, ':', own.fd, own.index, inode)) return std::nullopt;
    struct stat found {};
    if (own.index < 0 || ::fstat(own.fd, &found) != 0 || found.st_ino != inode) return std::nullopt;
    return own;
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace

LossNotes::LossNotes(int n) : table_(::memfd_create("lockstep-notes", MFD_CLOEXEC)) {
  const auto size = static_cast<off_t>(sizeof(Slot)) * n;
  if (!table_ || ::ftruncate(table_.get(), size) != 0) {
    raise(system_failure(errno, "memfd_create for the workers' notes"));
  }
}

std::string LossNotes::variable(int worker) const {
  struct stat own {};
  if (::fstat(table_.get(), &own) != 0) return "";
  return cat(table_.get(), ":", worker, ":", own.st_ino);
}

std::optional<std::string> LossNotes::read(int worker) const {
  const auto slot = read_slot(table_.get(), worker);
  if (!slot || slot->pid == 0) return std::nullopt;
  return text_of(*slot);
}

// Called on the way out of a failing process: it takes no lock, and a failure of its own is ignored.
void note_loss(std::string_view message) noexcept {
  const auto own = own_slot();
  if (!own) return;
  Slot slot;
  slot.pid = ::getpid();
  slot.length = static_cast<std::uint32_t>(std::min(message.size(), sizeof slot.text));
  std::memcpy(slot.text, message.data(), slot.length);
  (void)!::pwrite(own->fd, &slot, sizeof slot, static_cast<off_t>(sizeof slot) * own->index);
}

std::string loss_noted_by(pid_t pid) noexcept {
  const auto own = own_slot();
  if (!own || pid <= 0) return "";
  try {
    for (int i = 0;; ++i) {
      const auto slot = read_slot(own->fd, i);
      if (!slot) return "";
      if (slot->pid == pid) return text_of(*slot);
    }
  } catch (...) {
    return "";
  }
}

}  // namespace lockstep::base
