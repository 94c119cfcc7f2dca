#include "lockstep/courier/internal/shared_mapping.h"

#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::courier::internal {
namespace {

using Inode = std::pair<dev_t, ino_t>;

struct Made {
  std::mutex mutex;
  std::map<Inode, std::weak_ptr<net::Segment>> segments;  // guarded by mutex
};

// Never destroyed: views of messages may be dropped while the process ends.
Made& made() {
  static auto* const all = new Made;
  return *all;
}

Inode inode_of(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) raise(system_failure(errno, "stat of a shared segment"));
  return {info.st_dev, info.st_ino};
}

}  // namespace

Mapping create_mapping(const std::string& name, std::size_t n_bytes) {
  const auto mapping = std::make_shared<net::Segment>(net::Segment::create(name, n_bytes));
  auto& all = made();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.segments, [](const auto& entry) { return entry.second.expired(); });
  all.segments[inode_of(mapping->fd())] = mapping;
  return mapping;
}

Mapping map_descriptor(Fd fd, std::size_t n_bytes) {
  auto& all = made();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.segments.find(inode_of(fd.get()));
    if (found != all.segments.end()) {
      if (auto mapping = found->second.lock(); mapping && mapping->size() == n_bytes) return mapping;
    }
  }
  return std::make_shared<net::Segment>(net::Segment::from_fd(std::move(fd), n_bytes));
}

}  // namespace lockstep::courier::internal
