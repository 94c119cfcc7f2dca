// What one process has read of a FileStore's log, and its way to extend it. Shared by clones of one handle.
//
// Thread safety: the three calls at the top may come from any thread; everything the callbacks they are given
// may call is marked so, and runs under the replica's mutex.
#pragma once

#include <sys/types.h>

#include <deque>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/checks.h"
#include "lockstep/store/internal/file_log.h"

namespace lockstep::internal {

// A wait for keys: the timeout is what the caller asked for and the error says, the deadline what is left of
// it.
struct FileWait {
  std::span<const std::string> keys;
  Milliseconds timeout;
  Deadline deadline = Deadline::after(timeout);
};

class FileReplica {
 public:
  // Creates the file when absent and counts itself in. Errors: as FileStore::open.
  FileReplica(std::string path, int world_size, Milliseconds timeout);
  // Counts itself out, best effort; the last of world_size removes the file.
  ~FileReplica();

  // look() on the data as it is now. Raises kTimeout when the file cannot be had in time.
  template <class Look>
  auto read(Milliseconds timeout, Look look);
  // look() as soon as ready(); both see the same moment.
  template <class Ready, class Look>
  auto read_when(const FileWait& wait, Ready ready, Look look);
  // edit(out) under the exclusive lock; what it puts into `out` is appended in one write. Returns what it
  // returns.
  template <class Edit>
  auto change(Milliseconds timeout, Edit edit, LockedLog::Mode mode = LockedLog::Mode::kWrite);

  // For callbacks: mutex_ is held, though the analysis cannot see it.
  bool all_exist(std::span<const std::string> keys) const;
  // Null when absent; good until the callback returns.
  const Bytes* find(const std::string& key) const;
  const std::deque<Bytes>* find_queue(const std::string& key) const;
  const std::unordered_map<std::string, Bytes>& values() const {
    mutex_.assume_held();
    return values_;
  }

  const std::string& path() const { return path_; }
  std::string describe() const;

 private:
  static constexpr Milliseconds kShortestPoll{1};
  static constexpr Milliseconds kLongestPoll{10};

  // False when file or lock could not be had in time.
  bool refresh(Deadline deadline) LOCKSTEP_REQUIRES(mutex_);
  void replay(const LockedLog& log) LOCKSTEP_REQUIRES(mutex_);
  void check_head(std::span<const std::uint8_t> bytes) const;
  void apply(std::span<const std::uint8_t> bytes) LOCKSTEP_REQUIRES(mutex_);
  void apply(const LogRecord& record) LOCKSTEP_REQUIRES(mutex_);
  void commit(LockedLog& log, const base::ByteWriter& out) LOCKSTEP_REQUIRES(mutex_);
  void sign_off();
  [[noreturn]] void raise_unavailable(Milliseconds timeout) const;
  [[noreturn]] void raise_foreign(std::uint64_t at) const;

  // Constant after construction.
  const std::string path_;
  const int world_size_;
  const pid_t owner_;

  base::Mutex mutex_;
  base::ConditionVariable changed_;  // this process wrote: its waiters need not finish their pause
  std::uint64_t position_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // where the last whole record we know ends
  std::unordered_map<std::string, Bytes> values_ LOCKSTEP_GUARDED_BY(mutex_);
  // Never holds an empty queue.
  std::unordered_map<std::string, std::deque<Bytes>> queues_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t refcount_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::int64_t cleanup_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

template <class Look>
auto FileReplica::read(Milliseconds timeout, Look look) {
  const base::MutexLock lock(mutex_);
  if (!refresh(Deadline::after(timeout))) raise_unavailable(timeout);
  return look();
}

template <class Ready, class Look>
auto FileReplica::read_when(const FileWait& wait, Ready ready, Look look) {
  Milliseconds poll = kShortestPoll;
  base::SlowWait slow(wait.deadline);
  const base::MutexLock lock(mutex_);
  for (;; poll = std::min(poll * 2, kLongestPoll)) {
    // In slices, so that other threads get their turn while the file is absent or locked.
    refresh(std::min(wait.deadline, Deadline::after(kLongestPoll)));
    if (ready()) return look();
    if (wait.deadline.expired()) raise_wait_timeout(describe(), wait.timeout, wait.keys);
    slow.say_if_due([&] { return waiting_text(describe(), wait.keys); });
    changed_.wait_until(mutex_, std::min(wait.deadline, Deadline::after(poll)).time_point());
  }
}

template <class Edit>
auto FileReplica::change(Milliseconds timeout, Edit edit, LockedLog::Mode mode) {
  const base::MutexLock lock(mutex_);
  auto log = LockedLog::open(path_, mode, Deadline::after(timeout));
  if (!log) raise_unavailable(timeout);
  replay(*log);
  base::ByteWriter out;
  if constexpr (std::is_void_v<decltype(edit(out))>) {
    edit(out);
    commit(*log, out);
  } else {
    auto result = edit(out);
    commit(*log, out);
    return result;
  }
}

}  // namespace lockstep::internal
