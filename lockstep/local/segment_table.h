// The segments that this process has made, each mapped once: ranks and workers that are threads of one process know
// nothing of each other, and find the maker's mapping here when they are handed its descriptor or its number. Two mappings
// of one memory would cost address space, and look to TSan like memory without synchronisation.
//
// A segment of another process is mapped anew by everyone who is handed it. What two threads here do with it is ordered
// by words that a third process passes on, which TSan cannot see: at two addresses it has nothing to complain about.
//
// The table does not own: a segment goes with its last Mapping. Thread safety: every function. Nothing blocks.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/forks.h"
#include "lockstep/net/segment.h"

namespace lockstep::local {

using Mapping = std::shared_ptr<net::Segment>;

// One memory of this host, as long as any process has it.
struct SegmentId {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  friend auto operator<=>(const SegmentId&, const SegmentId&) = default;
};

class SegmentTable {
 public:
  // Never destroyed: views of messages may be dropped while the process ends.
  static SegmentTable& of_process();

  // Raises as Segment::create.
  Mapping create(const std::string& name, std::size_t n_bytes);
  // The maker's mapping if this process made it, else a new one, without its descriptor: pages come and go at their
  // maker's word only. Raises as Segment::from_fd.
  Mapping map(base::Fd fd, std::size_t n_bytes);
  // For threads of one process, without a descriptor. Null when this process did not make it, or it is gone.
  Mapping find(const SegmentId& id);

  // Pre: it still has its descriptor. Raises kSystem.
  static SegmentId id_of(const net::Segment& segment);

 private:
  // What a forked child inherits here was made by another process: that one may have made pages of its mapping private.
  struct Entry {
    std::weak_ptr<net::Segment> segment;
    base::MadeHere made_here;
  };

  std::mutex mutex_;
  std::map<SegmentId, Entry> made_;  // guarded by mutex_
};

}  // namespace lockstep::local
