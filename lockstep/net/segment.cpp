#include "lockstep/net/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::net {

namespace {

// F_SEAL_SEAL too: nobody can add a seal later that would stop the owner from writing.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MFD_NOEXEC_SEAL
constexpr unsigned MFD_NOEXEC_SEAL = 0x0008U;
#endif

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

// 0 when it does not fit.
std::size_t round_up(std::size_t n_bytes) {
  const std::size_t mask = page_size() - 1;
  return (n_bytes + mask) & ~mask;
}

base::Fd make_memfd(const std::string& name) {
  // Newer kernels want to know that nothing here is a program; older ones do not know the flag.
  base::Fd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) base::raise(base::system_failure(errno, base::cat("memfd_create ", name)));
  return fd;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  std::uint64_t value = 0;
  if (!(in >> word)) return std::nullopt;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc()) return std::nullopt;  // "max"
  return value;
}

// The number after `field` in a file of "field number" lines.
std::optional<std::uint64_t> read_field(const std::string& path, const std::string& field) {
  std::ifstream in(path);
  std::string word;
  std::uint64_t value = 0;
  for (std::string rest; in >> word; std::getline(in, rest)) {
    if (word == field && in >> value) return value;
  }
  return std::nullopt;
}

// Inactive pages of files are counted as used but can be dropped at once.
std::uint64_t room(std::uint64_t limit, std::uint64_t used, std::uint64_t reclaimable) {
  used -= std::min(used, reclaimable);
  return limit > used ? limit - used : 0;
}

// Of this process's control group and all above it (version 2), else version 1's memory controller as
// mounted.
std::uint64_t control_group_room() {
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const bool v2 = line.rfind("0::", 0) == 0;
    const auto v1 = line.find(":memory:");
    if (!v2 && v1 == std::string::npos) continue;
    std::string group = v2 ? line.substr(3) : line.substr(v1 + 8);
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    // The smallest room of the group and all above it: each level has a limit of its own.
    for (;;) {
      const std::string at = root + group + (group.empty() || group.back() == '/' ? "" : "/");
      const auto limit = read_number(at + (v2 ? "memory.max" : "memory.limit_in_bytes"));
      const auto used = read_number(at + (v2 ? "memory.current" : "memory.usage_in_bytes"));
      if (limit && used) {
        const auto file = read_field(at + "memory.stat", v2 ? "inactive_file" : "total_inactive_file");
        least = std::min(least, room(*limit, *used, file.value_or(0)));
      }
      if (group.empty() || group == "/") break;
      group.erase(group.rfind('/'));
    }
  }
  return least;
}

// Bytes of the range whose pages exist. The kernel reports holes of a memfd as files have them: pages never
// touched are holes.
std::uint64_t committed(int fd, std::size_t offset, std::size_t n_bytes) {
  const auto end = static_cast<off_t>(offset + n_bytes);
  std::uint64_t sum = 0;
  for (auto at = static_cast<off_t>(offset); at < end;) {
    const off_t data = ::lseek(fd, at, SEEK_DATA);
    if (data < 0 || data >= end) break;
    const off_t hole = ::lseek(fd, data, SEEK_HOLE);
    if (hole < 0) break;
    at = std::min(hole, end);
    sum += static_cast<std::uint64_t>(at - data);
  }
  return sum;
}

}  // namespace

std::uint64_t available_memory() {
  const auto machine = read_field("/proc/meminfo", "MemAvailable:");
  const std::uint64_t bytes = machine ? *machine * 1024 : std::numeric_limits<std::uint64_t>::max();
  return std::min(bytes, control_group_room());
}

Segment::Segment(base::Fd fd, std::uint8_t* data, std::size_t n_bytes)
    : fd_(std::move(fd)), data_(data), n_bytes_(n_bytes) {}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      n_bytes_(std::exchange(other.n_bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(n_bytes_, other.n_bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, n_bytes_);
}

Segment Segment::map(base::Fd fd, std::size_t n_bytes, const char* what) {
  // MAP_NORESERVE: a segment is mapped whole, used or not; commit() checks what is really used.
  void* at = ::mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (at == MAP_FAILED)
    base::raise(base::system_failure(errno, base::cat(what, ": mapping ", n_bytes, " bytes")));
  return Segment(std::move(fd), static_cast<std::uint8_t*>(at), n_bytes);
}

Segment Segment::create(const std::string& name, std::size_t n_bytes) {
  const std::size_t rounded = round_up(n_bytes);
  if (rounded == 0 || rounded > static_cast<std::size_t>(std::numeric_limits<off_t>::max())) {
    base::raise(ErrorKind::kUsage, base::cat("a shared segment cannot have ", n_bytes, " bytes"));
  }
  base::Fd fd = make_memfd(name);
  if (::ftruncate(fd.get(), static_cast<off_t>(rounded)) != 0) {
    base::raise(base::system_failure(errno, base::cat("sizing a shared segment of ", rounded, " bytes")));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    base::raise(base::system_failure(errno, "sealing a shared segment"));
  return map(std::move(fd), rounded, "shared segment");
}

// A descriptor of another process: without the seals its owner could shrink the memory, and every access here
// would raise SIGBUS.
Segment Segment::from_fd(base::Fd fd, std::size_t n_bytes) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) base::raise(ErrorKind::kUsage, "the descriptor of a shared segment is not a memfd");
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if ((seals & kNeeded) != kNeeded)
    base::raise(ErrorKind::kUsage, "a shared segment is not sealed against resizing");
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    base::raise(ErrorKind::kUsage, "a shared segment is sealed against writing");
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) base::raise(base::system_failure(errno, "stat of a shared segment"));
  const std::size_t rounded = round_up(n_bytes);
  if (rounded == 0 || static_cast<std::uint64_t>(info.st_size) != rounded) {
    base::raise(ErrorKind::kUsage, base::cat("a shared segment has ", info.st_size, " bytes where ", rounded,
                                             " were announced"));
  }
  return map(std::move(fd), rounded, "shared segment of a peer");
}

void Segment::check_range(std::size_t offset, std::size_t n_bytes, const char* what) const {
  if (offset <= n_bytes_ && n_bytes <= n_bytes_ - offset) return;
  base::raise(ErrorKind::kUsage,
              base::cat(what, " of ", n_bytes, " bytes at ", offset, " of a shared segment of ", n_bytes_));
}

void Segment::commit(std::size_t offset, std::size_t n_bytes) {
  check_range(offset, n_bytes, "commit");
  if (n_bytes == 0) return;
  // fallocate on a memfd asks the kernel page by page and ends in the out-of-memory killer, not in ENOMEM,
  // when a limit is hit half-way: look at the limits first.
  const std::uint64_t room = available_memory();
  if (n_bytes > room && n_bytes - committed(fd_.get(), offset, n_bytes) > room) {
    base::raise(ErrorKind::kResource,
                base::cat("shared memory: ", n_bytes >> 20, " MiB wanted, ", room >> 20,
                          " MiB available; give the job more memory or use smaller buffers"));
  }
  int result = 0;
  do {
    result = ::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0)
    base::raise(base::system_failure(errno, base::cat("shared memory: committing ", n_bytes, " bytes")));
}

// Whole pages inside the range only. A hole reads as zeros for every process that has the segment mapped.
void Segment::discard(std::size_t offset, std::size_t n_bytes) {
  check_range(offset, n_bytes, "discard");
  const std::size_t first = round_up(offset);
  const std::size_t last = (offset + n_bytes) & ~(page_size() - 1);
  if (first >= last) return;
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
                  static_cast<off_t>(last - first)) != 0) {
    base::raise(base::system_failure(errno, base::cat("shared memory: discarding ", n_bytes, " bytes")));
  }
}

// A private mapping of the same pages takes the place of the shared one in a single step, so no write is lost
// in between; then every page is copied, or a page of the segment that was not written here yet would still
// show through.
void Segment::make_private(std::size_t offset, std::size_t n_bytes) {
  check_range(offset, n_bytes, "make_private");
  const std::size_t first = offset & ~(page_size() - 1);
  const std::size_t length = std::min(round_up(offset + n_bytes), n_bytes_) - first;
  if (n_bytes == 0) return;
  void* at = ::mmap(data_ + first, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_.get(),
                    static_cast<off_t>(first));
  if (at == MAP_FAILED)
    base::raise(base::system_failure(errno, base::cat("shared memory: making ", length, " bytes private")));
  for (std::size_t page = 0; page < length; page += page_size()) {
    // A read-modify-write of every page makes the kernel copy it. Atomic: other threads of this process may
    // be using the buffer.
    std::atomic_ref<std::uint8_t>(data_[first + page]).fetch_or(0, std::memory_order_relaxed);
  }
}

}  // namespace lockstep::net
