// Shared memory: a sealed memfd, mapped whole. It cannot be shrunk or grown, so a mapping never becomes
// invalid under its reader. The kernel frees it with the last descriptor and mapping, however the processes
// end.
//
// The size may far exceed physical memory: pages are allocated by commit. Touching an uncommitted page works
// while memory is available and kills the process otherwise, so commit first.
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
  // Maps a segment created by another process. Raises kUsage when `fd` is not a memfd sealed against
  // shrinking and growing, or its size is not `n_bytes` rounded up to pages: the size a peer claims is never
  // trusted.
  static Segment from_fd(base::Fd fd, std::size_t n_bytes);

  // Allocates the pages of a range. Raises kResource when the machine or the control group lacks the memory;
  // the range is then unchanged or partly committed. Raises kUsage outside the segment.
  void commit(std::size_t offset, std::size_t n_bytes);
  // Frees the whole pages inside a range; they read as zero afterwards. Raises kUsage outside the segment.
  void discard(std::size_t offset, std::size_t n_bytes);
  // Makes the pages of a range private to this process: address and content stay, its writes are not shared,
  // and writes of others to the segment are not visible. A concurrent write by this process is preserved.
  // Raises kUsage outside the segment, kResource without memory for the copy.
  void make_private(std::size_t offset, std::size_t n_bytes);

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return n_bytes_; }
  // For SCM_RIGHTS; stays owned.
  int fd() const { return fd_.get(); }
  // Saves a descriptor when the mapping is only read and written. commit and discard fail afterwards.
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

// Bytes that could be allocated now: the machine's available memory, or less under a control group limit.
std::uint64_t available_memory();

}  // namespace lockstep::net
