// The two sides of a meeting, and what both use. Rank 0 runs the server's side, every other rank the
// client's; meeting.h draws what they exchange.
// Thread safety: each call uses only its arguments and the SegmentTable.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/local/internal/meeting_messages.h"
#include "lockstep/local/meeting.h"

namespace lockstep::local::internal {

// Rank 0's side of meet(), and that of the others.
std::vector<LocalPeer> meet_as_server(KeyValue& store, const MeetingOptions& options);
std::vector<LocalPeer> meet_as_client(KeyValue& store, const MeetingOptions& options);

// In the store: rank 0's address; the rank that found itself on another host than rank 0; and why rank 0 gave
// up, for those that come when it no longer listens.
inline constexpr const char* kAddressKey = "host/0";
inline constexpr const char* kElsewhereKey = "host/elsewhere";
inline constexpr const char* kGaveUpKey = "host/gave_up";

// After how long rank 0 may drop a silent caller for another one; also the longest pause of one that was
// dropped.
inline constexpr Milliseconds kGrace{100};

// The value if it is there now.
std::optional<Bytes> look_up(KeyValue& store, const char* key);

// The attendance in rank 0's segment. Raises as raise_stranger() when the segment is too small for it.
Attendance& attendance_in(const net::Segment& segment, const MeetingOptions& options);

// Maps the segment; from here on its contents are input, which the owner of the layout checks
// (HostPeers::adopt).
LocalPeer peer_of(const Introduction& own, Acquaintance them);

// "rank 3", "ranks 1, 3": the first 16.
std::string list_ranks(const std::vector<int>& ranks);
[[noreturn]] void raise_missing(const std::vector<int>& ranks);
[[noreturn]] void raise_elsewhere(int rank, int from);

// To a rank that may be gone by now.
template <class Send>
void send_to(int rank, const Send& send) {
  try {
    send();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    raise_gone(rank, "left or ended");
  }
}

}  // namespace lockstep::local::internal
