// A piece of memory that processes share: a sealed memfd, mapped whole. Nobody can shrink or grow it, so a
// mapping never ends under its reader; it is gone when the last descriptor and mapping are, however they
// went.
//
// The size may be far beyond memory: pages exist once committed. Touching a page that was never committed
// works while memory lasts and kills the process when it does not, so commit first.
//
// Thread safety: commit and discard may be called from any thread on distinct ranges. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/detail/fd.h"

namespace lockstep::net {

class Segment {
 public:
  // A new segment of `n_bytes` (rounded up to pages), all zero. `name` shows in /proc/<pid>/maps only.
  // Raises kResource or kSystem.
  static Segment create(const std::string& name, std::size_t n_bytes);
  // Maps a segment another process made. Raises kUsage when `fd` is not a memfd sealed against shrinking and
  // growing, or its size is not `n_bytes` rounded up to pages: a peer's word about the size is never trusted.
  static Segment from_fd(base::Fd fd, std::size_t n_bytes);

  // Makes the pages of a range exist. Raises kResource when neither the machine nor the control group has the
  // memory, leaving the range as it was or partly committed; kUsage outside the segment.
  void commit(std::size_t offset, std::size_t n_bytes);
  // Gives whole pages inside a range back; they read as zero afterwards. Raises kUsage outside the segment.
  void discard(std::size_t offset, std::size_t n_bytes);
  // From now on the pages of a range are this process's own: they keep address and content, what it writes stays here,
  // and what others write to the segment is not seen. A write of this process that runs at the same time is kept. Raises
  // kUsage outside the segment, kResource when there is no memory for the copy.
  void make_private(std::size_t offset, std::size_t n_bytes);

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return n_bytes_; }
  // For SCM_RIGHTS; stays owned.
  int fd() const { return fd_.get(); }
  // For a mapping that is only read and written: one descriptor less. commit and discard fail from then on.
  void close_fd() { fd_.reset(); }
  explicit operator bool() const { return data_ != nullptr; }

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

 private:
  Segment(base::Fd fd, std::uint8_t* data, std::size_t n_bytes);
  static Segment map(base::Fd fd, std::size_t n_bytes, const char* what);
  void check_range(std::size_t offset, std::size_t n_bytes, const char* what) const;

  base::Fd fd_;
  std::uint8_t* data_ = nullptr;
  std::size_t n_bytes_ = 0;
};

// Bytes of memory that could be had now: the machine's available memory, or less where a control group limits
// it.
std::uint64_t available_memory();

}  // namespace lockstep::net
