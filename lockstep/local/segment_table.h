// The segments that this process has created, each mapped once. Ranks and workers that are threads of one
// process are independent of each other; given a segment's descriptor or its id, they find its creator's
// mapping here. A second mapping of the same memory would cost address space, and TSan would miss all
// synchronisation through it.
//
// A segment of another process is mapped separately by each thread that receives it. Accesses of two threads
// here are ordered by words that a third process passes on, which TSan cannot see: at two addresses it
// reports no false race.
//
// The table does not own segments: one is unmapped with its last Mapping.
// Thread safety: every function may be called from any thread. Nothing blocks.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/forks.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/net/segment.h"

namespace lockstep::local {

using Mapping = std::shared_ptr<net::Segment>;

// Identifies a segment on this host for as long as any process has it open.
struct SegmentId {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  friend auto operator<=>(const SegmentId&, const SegmentId&) = default;
};

class SegmentTable {
 public:
  // Never destroyed: views of messages may be released during static destruction.
  static SegmentTable& of_process();

  // Raises as Segment::create.
  Mapping create(const std::string& name, std::size_t n_bytes);
  // The creator's mapping if this process created it, else a new one without its descriptor: only the creator
  // commits and discards pages. Raises as Segment::from_fd.
  Mapping map(base::Fd fd, std::size_t n_bytes);
  // For threads of one process, without a descriptor. Null when this process did not create it, or it has
  // been unmapped.
  Mapping find(const SegmentId& id);

  // Pre: it still has its descriptor. Raises kSystem.
  static SegmentId id_of(const net::Segment& segment);

 private:
  // What a forked child inherits here was made by another process: that one may have made pages of its
  // mapping private.
  struct Entry {
    std::weak_ptr<net::Segment> segment;
    base::MadeHere made_here;
  };

  base::Mutex mutex_;
  std::map<SegmentId, Entry> made_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::local
