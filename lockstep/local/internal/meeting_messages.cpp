#include "lockstep/local/internal/meeting_messages.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/net/peer_handshake.h"

namespace lockstep::local::internal {
namespace {

constexpr std::uint64_t kMeetingMagic = 0x6c6f636b73746570;  // "lockstep"
constexpr std::uint32_t kMeetingVersion = 8;

// Messages are structs as they are in memory: both ends run on one host, and the version changes with the
// layout.
enum class ReplyKind : std::uint32_t { kRoster = 1, kDescriptors, kRefusal };

// The beginning of every message after the handshake.
struct Head {
  std::uint64_t magic = kMeetingMagic;
  std::uint32_t version = kMeetingVersion;
  ReplyKind kind{};
};
struct Refusal {
  Head head;
  std::int32_t kind;       // ErrorKind
  std::int32_t peer_rank;  // -1: none
  char message[768];
};
static_assert(std::is_trivially_copyable_v<Introduction> && std::is_trivially_copyable_v<Refusal>);
static_assert(sizeof(Head) + kMaxLocalRanks * sizeof(Introduction) <= net::kMaxUnixMessage);
static_assert(sizeof(Refusal) <= kMaxReply && net::kMaxPeerMessage <= kMaxReply);

// Descriptors that travel in one message; three belong together. Memory, lifeline and, where the kernel has
// pidfds, the process.
constexpr std::size_t kRanksPerMessage = net::kMaxUnixFds / 3;

template <class T>
std::span<const std::uint8_t> bytes_of(const T& message) {
  return {reinterpret_cast<const std::uint8_t*>(&message), sizeof(message)};
}

// Exact lengths: a message that is longer or shorter than its kind says is no message.
bool is(std::span<const std::uint8_t> message, ReplyKind kind, std::size_t n_bytes) {
  Head head;
  if (message.size() != n_bytes || n_bytes < sizeof(head)) return false;
  std::memcpy(&head, message.data(), sizeof(head));
  return head.magic == kMeetingMagic && head.version == kMeetingVersion && head.kind == kind;
}

Introduction introduction_at(const std::uint8_t* bytes) {
  Introduction who;
  std::memcpy(&who, bytes, sizeof(who));
  who.process[kProcessBytes - 1] = '\0';  // a peer wrote it: terminate it in any case
  return who;
}

// Takes the descriptors of one rank off the front of `fds`.
Descriptors take(std::vector<base::Fd>& fds, std::size_t& at, bool with_process) {
  Descriptors one{.memory = std::move(fds[at]), .lifeline = std::move(fds[at + 1]), .process = {}};
  at += 2;
  if (with_process) one.process = std::move(fds[at++]);
  return one;
}

}  // namespace

void raise_stranger() {
  base::raise(ErrorKind::kSystem, "the process that answered for rank 0 does not belong to this job",
              ErrorFamily::kBackend);
}

// The key is made for this meeting: only who can read the group's store can join, whatever else runs on the
// host.
MeetingAddress MeetingAddress::of(const std::string& socket) {
  return {.host = base::host_identity(),
          .process = OwnProcess::token(),
          .socket = socket,
          .key = base::random_hex(JobSecret::kBytes)};
}

Bytes MeetingAddress::encode() const {
  base::ByteWriter out;
  out.put(kMeetingVersion).sized(host).sized(process).sized(socket).sized(key);
  return out.take();
}

std::optional<MeetingAddress> MeetingAddress::decode(std::span<const std::uint8_t> bytes) {
  base::ByteReader in(bytes);
  if (in.get<std::uint32_t>() != kMeetingVersion) return std::nullopt;
  const auto host = in.sized(), process = in.sized(), socket = in.sized(), key = in.sized();
  if (!host || !process || !socket || !key || key->size() != 2 * JobSecret::kBytes) return std::nullopt;
  return MeetingAddress{to_text(*host), to_text(*process), to_text(*socket), to_text(*key)};
}

JobSecret MeetingAddress::secret() const {
  return JobSecret::from_digits(key, "rank 0's address in the store");
}

Introduction Introduction::of(const MeetingOptions& options) {
  Introduction own{.version = options.version,
                   .rank = options.rank,
                   .size = options.size,
                   .has_process = OwnProcess::descriptors().pidfd >= 0 ? 1u : 0u,
                   .pid = ::getpid(),
                   .segment_bytes = options.own->size(),
                   .segment = SegmentTable::id_of(*options.own),
                   .process = {}};
  OwnProcess::token().copy(own.process, sizeof(own.process) - 1);
  return own;
}

bool Introduction::same_process(const Introduction& other) const {
  return std::strncmp(process, other.process, kProcessBytes) == 0;
}

Bytes encode_introduction(const Introduction& who) {
  const auto bytes = bytes_of(who);
  return Bytes(bytes.begin(), bytes.end());
}

std::optional<Introduction> decode_introduction(std::span<const std::uint8_t> bytes) {
  if (bytes.size() != sizeof(Introduction)) return std::nullopt;
  return introduction_at(bytes.data());
}

DescriptorNumbers DescriptorNumbers::of(const net::Segment& segment) {
  const auto process = OwnProcess::descriptors();
  return {.memory = segment.fd(), .lifeline = process.lifeline, .process = process.pidfd};
}

std::vector<int> DescriptorNumbers::list() const {
  std::vector<int> numbers{memory, lifeline};
  if (process >= 0) numbers.push_back(process);
  return numbers;
}

// Descriptors that are not taken are closed with the vector, so a peer that sends too many costs nothing.
std::optional<Descriptors> take_descriptors(std::vector<base::Fd> fds, bool same_process) {
  // A rank thread of the same process uses the descriptors that are there, and sends none.
  if (same_process) return fds.empty() ? std::optional(Descriptors{}) : std::nullopt;
  if (fds.size() != 2 && fds.size() != 3) return std::nullopt;
  std::size_t at = 0;
  return take(fds, at, fds.size() == 3);
}

// The kernel limits how many descriptors one message carries, so the roster is one message and the
// descriptors are several. Both sides derive from the roster which ranks have descriptors and how many: they
// are not tagged. Rank 0's own came with the welcome.
void send_roster(net::UnixSocket& to, const Introduction& receiver, std::span<const Introduction> all,
                 std::span<const DescriptorNumbers> descriptors, Deadline deadline) {
  const Head head{.kind = ReplyKind::kRoster};
  base::ByteWriter roster;
  roster.put(head).raw({reinterpret_cast<const std::uint8_t*>(all.data()), all.size_bytes()});
  to.send(roster.view(), deadline);
  const Head with{.kind = ReplyKind::kDescriptors};
  std::vector<int> numbers;
  std::size_t n_ranks = 0;
  const auto flush = [&] {
    if (!numbers.empty()) to.send(bytes_of(with), deadline, numbers);
    numbers.clear();
    n_ranks = 0;
  };
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].same_process(receiver)) continue;
    const auto more = descriptors[r].list();
    numbers.insert(numbers.end(), more.begin(), more.end());
    if (++n_ranks == kRanksPerMessage) flush();
  }
  flush();
}

// The struct was zeroed, so the text is terminated. A tenth of a second at most: whoever refuses has a
// failure of its own to report.
void send_refusal(net::UnixSocket& to, const Failure& failure) noexcept {
  Refusal refusal{.head = {.kind = ReplyKind::kRefusal},
                  .kind = static_cast<std::int32_t>(failure.kind),
                  .peer_rank = failure.peer.value_or(LostPeer{}).rank.value_or(-1),
                  .message = {}};
  failure.message.copy(refusal.message, sizeof(refusal.message) - 1);
  try {
    to.send(bytes_of(refusal), Deadline::after(Milliseconds(100)));
  } catch (...) {
    // The receiver is gone itself.
  }
}

std::size_t receive_packet(net::UnixSocket& socket, std::span<std::uint8_t> buffer,
                           std::vector<base::Fd>& fds, Deadline deadline) {
  try {
    return socket.receive(buffer, deadline, &fds);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    base::raise(Failure{.kind = ErrorKind::kPeerLost,
                        .message = "rank 0 ended while the group was forming",
                        .family = ErrorFamily::kBackend,
                        .peer = LostPeer{.rank = 0, .cause = "ended"}});
  }
}

std::size_t receive_from_first(net::UnixSocket& socket, std::span<std::uint8_t> buffer,
                               std::vector<base::Fd>& fds, Deadline deadline) {
  const std::size_t length = receive_packet(socket, buffer, fds, deadline);
  if (!is(buffer.first(length), ReplyKind::kRefusal, sizeof(Refusal))) return length;
  Refusal refusal;
  std::memcpy(&refusal, buffer.data(), sizeof(refusal));
  refusal.message[sizeof(refusal.message) - 1] = '\0';
  // Rank 0 may run another build, with other kinds.
  const bool known = refusal.kind >= 0 && refusal.kind <= static_cast<std::int32_t>(ErrorKind::kInternal);
  Failure failure{.kind = known ? static_cast<ErrorKind>(refusal.kind) : ErrorKind::kInternal,
                  .message = refusal.message,
                  .family = ErrorFamily::kBackend};
  if (refusal.peer_rank >= 0) failure.peer = LostPeer{.rank = refusal.peer_rank};
  base::raise(std::move(failure));
}

std::vector<Acquaintance> receive_roster(net::UnixSocket& socket, const Introduction& own,
                                         Deadline deadline) {
  const auto n = static_cast<std::size_t>(own.size);
  // Large enough for either: the roster of all ranks, or a refusal instead of it.
  std::vector<std::uint8_t> buffer(std::max(sizeof(Head) + n * sizeof(Introduction), kMaxReply));
  std::vector<base::Fd> fds;
  const std::size_t length = receive_from_first(socket, buffer, fds, deadline);
  if (!is({buffer.data(), length}, ReplyKind::kRoster, sizeof(Head) + n * sizeof(Introduction)))
    raise_stranger();
  std::vector<Acquaintance> all(n);
  for (std::size_t r = 0; r < n; ++r)
    all[r].who = introduction_at(buffer.data() + sizeof(Head) + r * sizeof(Introduction));
  std::size_t at = 0;
  for (std::size_t r = 1; r < n; ++r) {
    if (all[r].who.same_process(own)) continue;
    // The next message of descriptors only when the last one is used up: send_roster() never splits a rank
    // over two.
    if (at == fds.size()) {
      at = 0;
      fds.clear();
      const std::size_t got = receive_from_first(socket, buffer, fds, deadline);
      if (!is({buffer.data(), got}, ReplyKind::kDescriptors, sizeof(Head)) || fds.empty()) raise_stranger();
    }
    const bool with_process = all[r].who.has_process != 0;
    if (fds.size() - at < (with_process ? 3u : 2u)) raise_stranger();
    all[r].descriptors = take(fds, at, with_process);
  }
  return all;
}

}  // namespace lockstep::local::internal
