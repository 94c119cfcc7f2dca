// How ranks on one host find each other, once. Rank 0 publishes its address in a key-value space; the others
// connect to it and learn about each other through it. The cost is linear in the number of ranks, except that
// every rank maps every segment.
//
//   rank r                                  rank 0
//   handshake (net/peer_handshake.h): both have read the same key in the store
//   introduction; descriptors         --->  its segment and its pidfd, sent to a peer that has proven itself
//                                     <---  welcome; its own descriptors (its segment shows who has arrived)
//                                           ... until all ranks have arrived ...
//                                     <---  roster: all ranks; then their descriptors
//                                     or    refusal: why the meeting failed
//
// Before a descriptor is sent or taken each side has checked with the kernel that the other runs as the same
// user, and has proven that it knows the key, which rank 0 generated for this meeting. A foreign process that
// connects and sends nothing, or garbage, is dropped and delays no rank. Ranks that are threads of one
// process exchange no descriptors: they find each other's memory in the SegmentTable.
// Thread safety: ranks that are threads of one process may call meet() concurrently; each uses its own store.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/local/peer_process.h"
#include "lockstep/local/segment_table.h"

namespace lockstep::local {

inline constexpr int kMaxLocalRanks = 256;

// The store through which ranks find each other. Used only by the thread that calls meet().
class KeyValue {
 public:
  virtual ~KeyValue() = default;
  // Raises when the store cannot be reached.
  virtual void set(const std::string& key, std::span<const std::uint8_t> value) = 0;
  // The value once it is set; nothing at the deadline. Raises kPeerLost when it is known that the meeting
  // cannot succeed, kSystem otherwise.
  virtual std::optional<Bytes> get(const std::string& key, Deadline deadline) = 0;
};

// In rank 0's segment: which ranks have arrived, so that a rank that times out can name the missing ones.
// Initially all zero.
struct Attendance {
  std::atomic<std::uint32_t> arrived[kMaxLocalRanks];
};

struct MeetingOptions {
  int rank = 0;
  int size = 1;
  std::string group{};        // for messages
  std::uint32_t version = 0;  // of what is laid out in the segments: the same on all ranks
  // Created by the SegmentTable. Must live until all ranks have met: ranks of the same process find it there,
  // others have its descriptor.
  Mapping own{};
  std::uint64_t attendance_at = 0;  // offset of an Attendance in each segment
  Deadline deadline = Deadline::never();
};

// One rank as seen from here; also for this rank itself.
struct LocalPeer {
  Mapping segment{};
  bool same_process = false;
  std::int64_t pid = 0;   // in its own pid namespace: for messages only
  PeerProcess process{};  // empty for ranks of this process
};

// All ranks, by rank. Blocks until all have arrived, or the deadline. Raises kTimeout naming who is missing,
// kPeerLost naming who left or ended, kUnsupported naming a rank on another host, kUsage when ranks do not
// agree on the group's size or the layout's version, kSystem when the process that answers for rank 0 does
// not belong to this job, kResource.
std::vector<LocalPeer> meet(KeyValue& store, const MeetingOptions& options);

// How often a waiting rank checks whether the meeting can still succeed.
inline constexpr Milliseconds kMeetingSlice{100};

// "rank 3 left while the group was forming".
[[noreturn]] void raise_gone(int rank, const char* how);

}  // namespace lockstep::local
