// The file under a FileStore: an append-only log of records, shared by processes through flock(2).
//
//   file   := record*
//   record := uint32 n, key[n], uint32 m, value[m]        little-endian, as torch's FileStore writes it
//   key    := "/" user-key        value is the key's new value
//           | "-/" user-key       the key is deleted; value empty
//           | ">/" user-key       value joins the key's queue          (lockstep only: torch sees an unused key)
//           | "</" user-key       the queue's oldest entry is taken; value empty           (likewise)
//           | "refcount/"         handles open now, decimal
//           | "cleanup/"          handles closed so far, decimal
//
// The first record of every log is a "refcount/". A record that ends beyond the file is torn: its writer died
// while writing. Readers stop before it; the next writer cuts it off.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/fd.h"

namespace lockstep::internal {

inline constexpr std::string_view kRefcountKey = "refcount/";
inline constexpr std::string_view kCleanupKey = "cleanup/";
inline constexpr std::string_view kSetMark = "/";
inline constexpr std::string_view kDeleteMark = "-/";
inline constexpr std::string_view kPushMark = ">/";
inline constexpr std::string_view kTakeMark = "</";

struct LogRecord {
  std::string_view key;
  std::span<const std::uint8_t> value;
};

enum class Decoded : std::uint8_t { kRecord, kEnd, kTorn, kForeign };

// Takes the next record; `record` points into the reader's bytes. Anything but kRecord leaves the reader
// where it was. kForeign: no FileStore wrote this. Never reads or allocates by a length it has not compared
// with what is left.
Decoded decode_record(base::ByteReader& in, LogRecord& record);

// Raises kUsage when key or value is too long for the format.
void encode_record(base::ByteWriter& out, std::string_view key, std::span<const std::uint8_t> value);

// The log opened and locked, until destroyed. Opened anew for every operation: a lock belongs to the open
// file, so one kept over fork would not keep parent and child apart, and opening is what makes NFS show fresh
// contents.
class LockedLog {
 public:
  enum class Mode : std::uint8_t { kRead, kWrite, kCreate };

  // Waits for the file (unless kCreate makes it) and for the lock, up to the deadline; nothing when that
  // passes. Raises DistStoreError naming the path when the file cannot be opened for another reason than
  // being absent.
  static std::optional<LockedLog> open(const std::string& path, Mode mode, Deadline deadline);

  // Bytes in the file now, looked at without a lock; nothing when it is absent.
  static std::optional<std::uint64_t> peek_size(const std::string& path);

  // Bytes in the file. Constant while locked, but for append.
  std::uint64_t size() const { return size_; }
  // The bytes from `from` to the end. Raises DistStoreError when `from` is beyond it: somebody replaced the
  // file.
  Bytes read(std::uint64_t from) const;
  // Writes `records` at `at`, cutting off what was there. All or, when the disk is full, nothing.
  void write(std::uint64_t at, std::span<const std::uint8_t> records);
  // Removes the file's name, while the lock keeps newcomers out.
  void remove() noexcept;

 private:
  LockedLog(base::Fd fd, std::string path, std::uint64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}
  [[noreturn]] void fail(int code, const char* what) const;

  base::Fd fd_;  // closing it gives the lock back
  std::string path_;
  std::uint64_t size_;
};

}  // namespace lockstep::internal
