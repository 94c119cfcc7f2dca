// The side of a meeting of every rank but rank 0.
#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/local/internal/meeting_messages.h"
#include "lockstep/local/internal/meeting_sides.h"
#include "lockstep/net/peer_handshake.h"

namespace lockstep::local::internal {
namespace {

// A timeout of the own socket, not one that rank 0 reported.
bool is_own_timeout(const Error& error) {
  return error.kind() == ErrorKind::kTimeout && error.failure().family == ErrorFamily::kNetwork;
}

// Connects to rank 0 and receives the roster. One thread, no locks.
//
//   read rank 0's address --> connect --> handshake, introduction --> welcome: --> roster:
//   in the store                 ^             |                      rank 0's     the other
//                                |             |                      segment      ranks
//                                '--dropped----'   with increasing pauses; not when rank 0 has given up or ended
//
// Every wait is split into slices, and the store is read between them, since rank 0 may have given up.
class MeetingClient {
 public:
  MeetingClient(KeyValue& store, const MeetingOptions& options)
      : store_(store), options_(options), own_(Introduction::of(options)) {}

  std::vector<LocalPeer> run() {
    const MeetingAddress address = address_of_first();
    std::vector<LocalPeer> peers(static_cast<std::size_t>(options_.size));
    call(address);
    for (Milliseconds pause{1};; pause = std::min(2 * pause, kGrace)) {
      try {
        peers[0] = shake_hands(address);
        break;
      } catch (const Error& error) {
        if (is_own_timeout(error)) raise_missing({0});
        if (error.kind() != ErrorKind::kPeerLost) throw;
        check_gave_up();  // before it accepted this connection
        // Or rank 0 dropped this one: it was silent for too long, as when it is stopped, or others needed the
        // place.
        if (!call_again(address)) throw;
      }
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, options_.deadline.remaining()));
    }
    try {
      for (auto& them : receive_roster(socket_, own_, options_.deadline)) {
        const int rank = them.who.rank;
        if (rank > 0 && rank < options_.size && !peers[static_cast<std::size_t>(rank)].segment)
          peers[static_cast<std::size_t>(rank)] = peer_of(own_, std::move(them));
      }
    } catch (const Error& error) {
      // A timeout that rank 0 reported names the missing ranks already.
      if (!is_own_timeout(error)) throw;
      raise_missing(missing(*peers[0].segment));
    }
    for (int r = 0; r < options_.size; ++r) {
      if (!peers[static_cast<std::size_t>(r)].segment)
        base::raise(ErrorKind::kInternal, base::cat("rank 0 did not introduce rank ", r),
                    ErrorFamily::kBackend);
    }
    return peers;
  }

 private:
  MeetingAddress address_of_first() {
    base::SlowWait slow(options_.deadline);
    auto published = store_.get(kAddressKey, slow.next());
    if (!published && !options_.deadline.expired()) {
      slow.say_if_due([&] {
        return base::cat("rank ", options_.rank, " waits for rank 0 to join group \"", options_.group, "\"");
      });
      published = store_.get(kAddressKey, options_.deadline);
    }
    if (!published) {
      base::raise(ErrorKind::kTimeout,
                  base::cat("rank 0 did not join the group in time: rank ", options_.rank,
                            " waited for its address in the store"),
                  ErrorFamily::kBackend);
    }
    const auto address = MeetingAddress::decode(*published);
    if (!address) {
      base::raise(ErrorKind::kInternal,
                  "rank 0 published an address this version cannot read; do all ranks run the same lockstep?",
                  ErrorFamily::kBackend);
    }
    if (address->host == base::host_identity()) return *address;
    // Notifies rank 0, which would wait for this rank.
    store_.set(kElsewhereKey, base::ByteWriter().put(static_cast<std::int32_t>(options_.rank)).view());
    raise_elsewhere(0, options_.rank);
  }

  // Raises what rank 0 left in the store, if anything.
  void check_gave_up() {
    if (const auto why = look_up(store_, kGaveUpKey))
      base::raise(ErrorKind::kPeerLost, base::cat("rank 0 gave up: ", as_text(*why)), ErrorFamily::kBackend);
  }

  // In slices, checking in between whether rank 0 has given up.
  template <class Attempt>
  auto patiently(const Attempt& attempt) {
    for (;;) {
      try {
        return attempt(std::min(options_.deadline, Deadline::after(kMeetingSlice)));
      } catch (const Error& error) {
        if (!is_own_timeout(error) || options_.deadline.expired()) throw;
      }
      check_gave_up();
    }
  }

  // The connection is refused while rank 0 is slow to accept, or when it has given up.
  void call(const MeetingAddress& address) {
    socket_ = patiently([&](Deadline slice) { return net::UnixSocket::connect(address.socket, slice); });
    // Before anything is sent: the descriptors give access to the segment.
    if (!socket_.trust_own_user()) raise_stranger();
  }

  // False when rank 0 has ended and does not listen any more.
  bool call_again(const MeetingAddress& address) {
    if (options_.deadline.expired()) return false;
    int code = 0;
    auto socket = net::UnixSocket::try_connect(address.socket, code);
    if (code == ECONNREFUSED) return false;
    if (socket) {
      socket_ = std::move(*socket);
      if (!socket_.trust_own_user()) raise_stranger();
    } else {
      call(address);
    }
    return true;
  }

  LocalPeer shake_hands(const MeetingAddress& address) {
    net::HandshakeInitiator handshake(address.secret(), address.binding(), encode_introduction(own_));
    const bool here = address.process == own_.process;
    const auto numbers = DescriptorNumbers::of(*options_.own).list();
    send_to(0, [&] { socket_.send(handshake.first(), options_.deadline); });
    for (bool proven = false;; proven = true) {
      std::uint8_t buffer[kMaxReply];
      std::vector<base::Fd> fds;
      const std::size_t length = patiently([&](Deadline slice) {
        return proven ? receive_from_first(socket_, buffer, fds, slice)
                      : receive_packet(socket_, buffer, fds, slice);
      });
      const auto step = handshake.next({buffer, length});
      if (!step.refusal.empty()) raise_stranger();
      if (!step.send.empty())
        send_to(0, [&] {
          socket_.send(step.send, options_.deadline,
                       here ? std::span<const int>() : std::span<const int>(numbers));
        });
      if (!step.welcome) continue;
      const auto who = decode_introduction(*step.welcome);
      auto descriptors = who ? take_descriptors(std::move(fds), who->same_process(own_)) : std::nullopt;
      if (!descriptors || who->rank != 0) raise_stranger();
      return peer_of(own_, {.who = *who, .descriptors = std::move(*descriptors)});
    }
  }

  // By the attendance in rank 0's segment (release by rank 0, acquire here).
  std::vector<int> missing(const net::Segment& first) {
    std::vector<int> ranks;
    for (int r = 0; r < options_.size; ++r) {
      if (attendance_in(first, options_).arrived[r].load(std::memory_order_acquire) == 0) ranks.push_back(r);
    }
    if (ranks.empty()) ranks.push_back(0);
    return ranks;
  }

  KeyValue& store_;
  const MeetingOptions& options_;
  const Introduction own_;
  net::UnixSocket socket_;
};

}  // namespace

std::vector<LocalPeer> meet_as_client(KeyValue& store, const MeetingOptions& options) {
  return MeetingClient(store, options).run();
}

}  // namespace lockstep::local::internal
