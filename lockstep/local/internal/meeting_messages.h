// The messages of a meeting, apart from the handshake. Everything decoded here may come from a stranger.
// Thread safety: none needed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/error.h"
#include "lockstep/local/meeting.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::local::internal {

// What rank 0 publishes in the store.
struct MeetingAddress {
  std::string host, process, socket;
  std::string key;  // 64 hexadecimal digits: whoever shows that it knows them has read them in the store

  static MeetingAddress of(const std::string& socket);
  Bytes encode() const;
  static std::optional<MeetingAddress> decode(std::span<const std::uint8_t> bytes);

  JobSecret secret() const;
  net::Binding binding() const { return {.purpose = net::Purpose::kHostLocal, .server = socket}; }
};

inline constexpr std::size_t kProcessBytes = 64;

// A rank as it describes itself.
struct Introduction {
  std::uint32_t version;  // of the layout of its segment
  std::int32_t rank;
  std::int32_t size;          // of the group it wants to join
  std::uint32_t has_process;  // a pidfd is among its descriptors
  std::int64_t pid;           // in its own pid namespace
  std::uint64_t segment_bytes;
  SegmentId segment;            // by which ranks of the same process find it
  char process[kProcessBytes];  // OwnProcess::token(), zero-terminated

  static Introduction of(const MeetingOptions& options);
  bool same_process(const Introduction& other) const;
};

Bytes encode_introduction(const Introduction& who);
std::optional<Introduction> decode_introduction(std::span<const std::uint8_t> bytes);

// What others get of a rank: its segment, its lifeline and its pidfd. The last may be empty: the kernel has
// none.
struct Descriptors {
  base::Fd memory, lifeline, process;
};
// The same, owned by others.
struct DescriptorNumbers {
  int memory = -1, lifeline = -1, process = -1;

  static DescriptorNumbers of(const net::Segment& segment);
  std::vector<int> list() const;
};

struct Acquaintance {
  Introduction who{};
  Descriptors descriptors{};  // empty for ranks of this process
};

// Of one rank, from what came with its introduction; nothing when these are not two or three, or none for a
// rank of this process.
std::optional<Descriptors> take_descriptors(std::vector<base::Fd> fds, bool same_process);

// ---- after the handshake ----

// `all` by rank; without descriptors for ranks of the receiver's process and for rank 0.
void send_roster(net::UnixSocket& to, const Introduction& receiver, std::span<const Introduction> all,
                 std::span<const DescriptorNumbers> descriptors, Deadline deadline);
// Never raises.
void send_refusal(net::UnixSocket& to, const Failure& failure) noexcept;

// One message of whoever answers for rank 0, unchecked. Raises kPeerLost when the connection ended.
std::size_t receive_packet(net::UnixSocket& socket, std::span<std::uint8_t> buffer,
                           std::vector<base::Fd>& fds, Deadline deadline);
// The same from rank 0 once it has proven itself: raises what it refuses with.
std::size_t receive_from_first(net::UnixSocket& socket, std::span<std::uint8_t> buffer,
                               std::vector<base::Fd>& fds, Deadline deadline);
inline constexpr std::size_t kMaxReply = 1024;  // to the handshake, or a refusal
// All ranks, by rank; rank 0's and this one's have no descriptors.
std::vector<Acquaintance> receive_roster(net::UnixSocket& socket, const Introduction& own, Deadline deadline);

[[noreturn]] void raise_stranger();

}  // namespace lockstep::local::internal
