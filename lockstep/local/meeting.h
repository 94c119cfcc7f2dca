// How ranks on one host meet, once. Rank 0 publishes its address in a key-value space; the others connect to it and get to
// know each other through it: linear in the number of ranks, but for the mapping of all segments by all.
//
//   rank r                                  rank 0
//   handshake (net/peer_handshake.h): both have read the same key in the store
//   introduction; descriptors         --->  its segment and its pidfd, sent to a peer that has proven itself
//                                     <---  welcome; its own descriptors (its segment shows who has come so far)
//                                           ... until all ranks have come ...
//                                     <---  roster: who all are; then their descriptors
//                                     or    refusal: why the meeting failed
//
// Before a descriptor is sent or taken each side has asked the kernel whether the other runs as the same user, and has
// proven that it knows the key, which rank 0 made for this meeting. A stranger that connects and sends nothing, or nonsense,
// is dropped and delays nobody. Ranks that are threads of one process exchange no descriptors: they find each
// other's memory in the SegmentTable.
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

// The store that ranks meet in. Used by the thread that meets.
class KeyValue {
 public:
  virtual ~KeyValue() = default;
  // Raises when the store is out of reach.
  virtual void set(const std::string& key, std::span<const std::uint8_t> value) = 0;
  // The value once it is there; nothing at the deadline. Raises kPeerLost when it is known that the ranks will not meet,
  // kSystem otherwise.
  virtual std::optional<Bytes> get(const std::string& key, Deadline deadline) = 0;
};

// In rank 0's segment: which ranks have come, so that one whose time is up can name those that have not. All zero at first.
struct Attendance {
  std::atomic<std::uint32_t> arrived[kMaxLocalRanks];
};

struct MeetingOptions {
  int rank = 0;
  int size = 1;
  std::string group{};        // for messages
  std::uint32_t version = 0;  // of what is laid out in the segments: the same on all ranks
  // Made by the SegmentTable. Lives until all have met: ranks of the same process find it there, others have its descriptor.
  Mapping own{};
  std::uint64_t attendance_at = 0;  // where in each segment an Attendance lies
  Deadline deadline = Deadline::never();
};

// One rank as seen from here; also for this rank itself.
struct LocalPeer {
  Mapping segment{};
  bool same_process = false;
  std::int64_t pid = -1;  // in its own pid namespace: for messages only
  PeerProcess process{};  // empty for ranks of this process
};

// All ranks, by rank. Blocks until all have come, or the deadline. Raises kTimeout naming who is missing, kPeerLost naming who
// left or ended, kUnsupported naming a rank on another host, kUsage when ranks do not agree on the group's size or the
// layout's version, kSystem when whoever answers for rank 0 is not of this job, kResource.
std::vector<LocalPeer> meet(KeyValue& store, const MeetingOptions& options);

// How often a waiting rank checks whether the meeting can still succeed.
inline constexpr Milliseconds kMeetingSlice{100};

// "rank 3 left while the group was forming".
[[noreturn]] void raise_gone(int rank, const char* how);

}  // namespace lockstep::local
