// What both sides of a meeting use; the sides themselves are internal/meeting_server.cpp and
// internal/meeting_client.cpp.
#include "lockstep/local/meeting.h"

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/local/internal/meeting_messages.h"
#include "lockstep/local/internal/meeting_sides.h"

namespace lockstep::local {
namespace internal {

std::optional<Bytes> look_up(KeyValue& store, const char* key) {
  try {
    return store.get(key, Deadline::after(Milliseconds(1)));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerLost) throw;
    return std::nullopt;  // a store that does not answer now may do so later
  }
}

Attendance& attendance_in(const net::Segment& segment, const MeetingOptions& options) {
  const std::uint64_t at = options.attendance_at;
  if (at > segment.size() || sizeof(Attendance) > segment.size() - at) raise_stranger();
  return *reinterpret_cast<Attendance*>(segment.data() + at);
}

LocalPeer peer_of(const Introduction& own, Acquaintance them) {
  LocalPeer peer{.same_process = them.who.same_process(own), .pid = them.who.pid};
  if (peer.same_process) {
    peer.segment = SegmentTable::of_process().find(them.who.segment);
    if (!peer.segment) raise_gone(them.who.rank, "left");
    return peer;
  }
  peer.segment = SegmentTable::of_process().map(std::move(them.descriptors.memory), them.who.segment_bytes);
  peer.process = PeerProcess(std::move(them.descriptors.process), std::move(them.descriptors.lifeline));
  return peer;
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i)
    text += base::cat(i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? base::cat(text, " and ", ranks.size() - kShown, " more") : text;
}

void raise_missing(const std::vector<int>& ranks) {
  base::raise(ErrorKind::kTimeout, base::cat(list_ranks(ranks), " did not join the group in time"),
              ErrorFamily::kBackend);
}

void raise_elsewhere(int rank, int from) {
  base::raise(ErrorKind::kUnsupported,
              base::cat("rank ", rank, " runs on another host or in another network namespace than rank ",
                        from, "; the host engine joins ranks of one host only"),
              ErrorFamily::kBackend);
}

}  // namespace internal

void raise_gone(int rank, const char* how) {
  base::raise(Failure{.kind = ErrorKind::kPeerLost,
                      .message = base::cat("rank ", rank, " ", how, " while the group was forming"),
                      .family = ErrorFamily::kBackend,
                      .peer = LostPeer{.rank = rank, .cause = how}});
}

std::vector<LocalPeer> meet(KeyValue& store, const MeetingOptions& options) {
  if (options.size == 1) {
    std::vector<LocalPeer> alone(1);
    alone[0] = {.segment = options.own, .same_process = true, .pid = internal::Introduction::of(options).pid};
    return alone;
  }
  return options.rank == 0 ? internal::meet_as_server(store, options)
                           : internal::meet_as_client(store, options);
}

}  // namespace lockstep::local
