#include "lockstep/local/segment_table.h"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::local {
namespace {

SegmentId id_behind(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) base::raise(base::system_failure(errno, "stat of a shared segment"));
  return {.device = info.st_dev, .inode = info.st_ino};
}

}  // namespace

SegmentTable& SegmentTable::of_process() {
  static auto* const table = new SegmentTable;
  return *table;
}

SegmentId SegmentTable::id_of(const net::Segment& segment) {
  return id_behind(segment.fd());
}

Mapping SegmentTable::create(const std::string& name, std::size_t n_bytes) {
  auto mapping = std::make_shared<net::Segment>(net::Segment::create(name, n_bytes));
  const SegmentId id = id_of(*mapping);
  const base::MutexLock lock(mutex_);
  // An inode number is reused once its segment is gone, so a stale entry must not survive the creation of
  // another one.
  std::erase_if(made_, [](const auto& entry) { return entry.second.segment.expired(); });
  made_.insert_or_assign(id, Entry{.segment = mapping, .made_here = {}});
  return mapping;
}

Mapping SegmentTable::find(const SegmentId& id) {
  const base::MutexLock lock(mutex_);
  const auto found = made_.find(id);
  return found == made_.end() || !found->second.made_here ? nullptr : found->second.segment.lock();
}

// A size that differs is not an error here: from_fd() checks it against the segment and raises.
Mapping SegmentTable::map(base::Fd fd, std::size_t n_bytes) {
  if (auto known = find(id_behind(fd.get())); known && known->size() == n_bytes) return known;
  auto mapping = std::make_shared<net::Segment>(net::Segment::from_fd(std::move(fd), n_bytes));
  mapping->close_fd();
  return mapping;
}

}  // namespace lockstep::local
