#include "lockstep/store/internal/file_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <thread>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

// Far above any sane key, far below what a misread length would give.
constexpr std::uint32_t kMaxKeyBytes = 1 << 20;

// flock has no timeout, so a lock held by a stopped process is waited for by polling, with longer and longer
// pauses.
class PollBackoff {
 public:
  explicit PollBackoff(Deadline deadline) : deadline_(deadline) {}
  // False when the deadline has passed.
  bool sleep() {
    if (deadline_.expired()) return false;
    std::this_thread::sleep_for(std::min(pause_, deadline_.remaining()));
    pause_ = std::min(pause_ * 2, kLongest);
    return true;
  }

 private:
  static constexpr std::chrono::nanoseconds kLongest{5'000'000};
  const Deadline deadline_;
  std::chrono::nanoseconds pause_{50'000};
};

// Whether the visible part of a key could be ours. What is not may be a user's own file: it must never be
// cut. By its first characters: "/" a value, "-/" a deletion, "</" and ">/" a queue, and the two counters
// without a mark.
bool plausible_key(std::string_view visible, std::uint32_t n_bytes) {
  if (n_bytes == 0 || n_bytes > kMaxKeyBytes) return false;
  if (visible.empty()) return true;
  const auto is_head_of = [&](std::string_view whole) { return whole.starts_with(visible); };
  switch (visible[0]) {
    case '/':
      return true;
    case '-':
    case '<':
    case '>':
      return visible.size() < 2 || visible[1] == '/';
    default:
      return (n_bytes == kRefcountKey.size() && is_head_of(kRefcountKey)) ||
             (n_bytes == kCleanupKey.size() && is_head_of(kCleanupKey));
  }
}

// In a folder that others may write to (/tmp), somebody may have been first: whoever owns the file, or may
// write to it, decides what every rank reads. A link could lead to any file of this user's.
void check_trust(const std::string& path, const struct stat& info) {
  const auto refuse = [&](auto... why) {
    base::raise(ErrorKind::kUsage, base::cat("FileStore: ", path, ' ', why...), ErrorFamily::kStore);
  };
  if (!S_ISREG(info.st_mode)) refuse("is not a plain file");
  if (info.st_uid != ::geteuid())
    refuse("belongs to user ", info.st_uid, ", not to user ", ::geteuid(), ": give each job a fresh path");
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    refuse("has a mode that lets others write to it: chmod go-w, or a fresh path");
}

// The path is opened anew for each operation, and never through a link. Not blocking: it may name a pipe.
constexpr int kOpenFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;

}  // namespace

// Works on a copy of the reader: `in` moves only past a whole record. A record: u32 length, key, u32 length,
// value. Torn: it ends too early, as when its writer died; foreign: it cannot become one, however many bytes
// follow.
Decoded decode_record(base::ByteReader& in, LogRecord& record) {
  if (in.left() == 0) return Decoded::kEnd;
  base::ByteReader ahead = in;
  const auto n_key = ahead.get<std::uint32_t>();
  if (!n_key) return Decoded::kTorn;
  const auto visible = ahead.raw(std::min<std::size_t>(*n_key, ahead.left()));
  if (!plausible_key(as_text(*visible), *n_key)) return Decoded::kForeign;
  if (visible->size() < *n_key) return Decoded::kTorn;
  const auto n_value = ahead.get<std::uint32_t>();
  if (!n_value) return Decoded::kTorn;
  const auto value = ahead.raw(*n_value);
  if (!value) return Decoded::kTorn;
  record = {as_text(*visible), *value};
  in = ahead;
  return Decoded::kRecord;
}

void encode_record(base::ByteWriter& out, std::string_view key, std::span<const std::uint8_t> value) {
  if (key.size() > kMaxKeyBytes || value.size() > std::numeric_limits<std::uint32_t>::max()) {
    base::raise(ErrorKind::kUsage,
                base::cat("FileStore: a key of ", key.size(), " bytes with a value of ", value.size(),
                          " bytes is beyond the file format (1 MiB and 4 GiB)"),
                ErrorFamily::kStore);
  }
  out.put(static_cast<std::uint32_t>(key.size()))
      .raw({reinterpret_cast<const std::uint8_t*>(key.data()), key.size()});
  out.put(static_cast<std::uint32_t>(value.size())).raw(value);
}

std::optional<LockedLog> LockedLog::open(const std::string& path, Mode mode, Deadline deadline) {
  const int flags =
      kOpenFlags | (mode == Mode::kRead ? O_RDONLY : O_RDWR) | (mode == Mode::kCreate ? O_CREAT : 0);
  const int lock = (mode == Mode::kRead ? LOCK_SH : LOCK_EX) | LOCK_NB;
  PollBackoff backoff(deadline);
  do {
    base::Fd fd(::open(path.c_str(), flags, 0600));
    if (!fd && (errno == EINTR || (errno == ENOENT && mode != Mode::kCreate))) continue;
    if (!fd && errno == ELOOP) {
      base::raise(ErrorKind::kUsage,
                  base::cat("FileStore: ", path, " is a symbolic link, which is not followed"),
                  ErrorFamily::kStore);
    }
    if (!fd)
      base::raise(
          base::system_failure(errno, base::cat("FileStore: cannot open ", path), ErrorFamily::kStore));
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) {
      base::raise(
          base::system_failure(errno, base::cat("FileStore: cannot stat ", path), ErrorFamily::kStore));
    }
    // Of the descriptor, not of the path: between two calls the name could be given to another file.
    check_trust(path, info);
    // The kernel releases the lock when its process ends, however it ends.
    while (::flock(fd.get(), lock) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        base::raise(
            base::system_failure(errno, base::cat("FileStore: cannot lock ", path), ErrorFamily::kStore));
      }
      if (!backoff.sleep()) return std::nullopt;
    }
    // Its size, now that nobody writes.
    if (::fstat(fd.get(), &info) != 0) {
      base::raise(
          base::system_failure(errno, base::cat("FileStore: cannot stat ", path), ErrorFamily::kStore));
    }
    // Without a name the last user removed it while we waited for the lock: open what has the name now.
    if (info.st_nlink > 0) return LockedLog(std::move(fd), path, static_cast<std::uint64_t>(info.st_size));
  } while (backoff.sleep());
  return std::nullopt;
}

std::optional<std::uint64_t> LockedLog::peek_size(const std::string& path) {
  // Not stat(2): on NFS only opening asks the server.
  const base::Fd fd(::open(path.c_str(), O_RDONLY | kOpenFlags));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return std::nullopt;
  return static_cast<std::uint64_t>(info.st_size);
}

void LockedLog::fail(int code, const char* what) const {
  base::raise(
      base::system_failure(code, base::cat("FileStore: cannot ", what, " ", path_), ErrorFamily::kStore));
}

Bytes LockedLog::read(std::uint64_t from) const {
  if (from > size_) {
    base::raise(
        ErrorKind::kSystem,
        base::cat("FileStore: ", path_, " has ", size_, " bytes where ", from,
                  " were read before: it was cut or replaced while in use; give each job a fresh path"),
        ErrorFamily::kStore);
  }
  Bytes bytes(size_ - from);
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n =
        ::pread(fd_.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(from + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(errno, "read");
    if (n == 0) break;  // cut by somebody who takes no lock
    done += static_cast<std::size_t>(n);
  }
  bytes.resize(done);
  return bytes;
}

// Cuts what a writer that died has left behind position `at`, then appends. Not atomic: readers take the
// lock, and the next writer cuts a torn record again.
void LockedLog::write(std::uint64_t at, std::span<const std::uint8_t> records) {
  if (at < size_ && ::ftruncate(fd_.get(), static_cast<off_t>(at)) != 0) fail(errno, "cut");
  std::size_t done = 0;
  while (done < records.size()) {
    const ssize_t n =
        ::pwrite(fd_.get(), records.data() + done, records.size() - done, static_cast<off_t>(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int code = errno;
      // What stays behind if this fails too is a torn record, which the next writer cuts.
      (void)!::ftruncate(fd_.get(), static_cast<off_t>(at));
      size_ = at;
      fail(code, "write");
    }
    done += static_cast<std::size_t>(n);
  }
  size_ = at + done;
}

void LockedLog::remove() noexcept {
  ::unlink(path_.c_str());
}

}  // namespace lockstep::internal
