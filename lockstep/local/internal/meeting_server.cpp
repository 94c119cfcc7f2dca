// Rank 0's side of a meeting.
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <list>
#include <utility>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/local/internal/meeting_messages.h"
#include "lockstep/local/internal/meeting_sides.h"
#include "lockstep/net/peer_handshake.h"

namespace lockstep::local::internal {
namespace {

// How long a caller may be silent before it has proven itself.
constexpr Milliseconds kProofPatience{2000};
// Callers accepted at one go: those of other users are dropped at once, and however many there are, rank 0
// looks at the others and at its deadline in between.
constexpr int kAcceptsPerTurn = 64;

// Callers that have not proven themselves; more wait in the kernel's queue. They must not use up the
// descriptors.
std::size_t most_pending() {
  constexpr std::size_t kMost = std::size_t{2} * kMaxLocalRanks;
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const std::size_t share = known ? static_cast<std::size_t>(limit.rlim_cur) / 8 : kMost;
  return std::clamp<std::size_t>(share, 8, kMost);
}

// A rank that has proven itself and waits for the others.
struct Caller {
  net::UnixSocket socket;
  Acquaintance acquaintance;
};

// Rank 0's side: accepts the other ranks and sends them the roster. One thread, no locks. A connection's
// states:
//
//   accepted --same user--> pending --proof, introduction--> caller --all have come--> roster sent
//               |              |
//               |              '--silent for kProofPatience, refused, or the oldest when there are too many--> dropped
//               '--another user--> dropped
//
// A pending connection uses a descriptor and may belong to a foreign process, so their number is bounded; a
// caller has proven that it knows the key, and is never dropped. An error that ends the meeting here is sent
// to all callers, and published in the store for ranks that arrive later.
class MeetingServer {
 public:
  MeetingServer(KeyValue& store, const MeetingOptions& options)
      : store_(store),
        options_(options),
        own_(Introduction::of(options)),
        listener_(net::UnixListener::listen()),
        address_(MeetingAddress::of(listener_.name())),
        secret_(address_.secret()),
        callers_(static_cast<std::size_t>(options.size)) {}

  std::vector<LocalPeer> run() {
    store_.set(kAddressKey, address_.encode());
    try {
      collect();
      return introduce_all();
    } catch (...) {
      const Failure failure = base::current_failure();
      for (auto& caller : callers_) {
        if (caller) send_refusal(caller->socket, failure);
      }
      try {
        store_.set(kGaveUpKey, to_bytes(failure.message));
      } catch (const Error&) {
        // The failure itself is more important.
      }
      throw;
    }
  }

 private:
  // A connection until it has proven itself or its time is up.
  struct Pending {
    net::UnixSocket socket;
    net::HandshakeResponder handshake;
    Deadline until;                            // when it is dropped unless it sends something
    Deadline grace = Deadline::after(kGrace);  // until when no other one takes its place
  };
  enum class Attended { kDone, kSilent, kSent };

  void collect() {
    attendance_in(*options_.own, options_).arrived[0].store(1, std::memory_order_release);
    base::SlowWait slow(options_.deadline);
    Deadline look = Deadline::after(kMeetingSlice);
    while (std::ranges::count(callers_, true, &std::optional<Caller>::has_value) + 1 < options_.size) {
      wait_for_callers(std::min(look, options_.deadline));
      accept_some();
      std::erase_if(pending_, [&](Pending& one) {
        const Attended what = attend(one);
        // Not one that has sent something: when rank 0 was stopped for a while, everybody's time is up.
        if (what == Attended::kSent) one.until = Deadline::after(kProofPatience);
        return what == Attended::kDone || one.until.expired();
      });
      if (!look.expired() && !options_.deadline.expired()) continue;
      look = Deadline::after(kMeetingSlice);
      look_for_failures();
      slow.say_if_due(
          [&] { return base::cat("rank 0 waits for ", list_ranks(missing()), " to join the group"); });
      if (options_.deadline.expired()) raise_missing(missing());
    }
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 1; r < options_.size; ++r) {
      if (!callers_[static_cast<std::size_t>(r)]) ranks.push_back(r);
    }
    return ranks;
  }

  // The listener is left out while nobody may be accepted: poll would return at once, and the loop would
  // spin.
  void wait_for_callers(Deadline until) {
    std::vector<pollfd> fds;
    if (is_full()) until = std::min(until, pending_.front().grace);
    if (!rest_.expired()) until = std::min(until, rest_);
    const bool rests = is_full() || !rest_.expired();
    fds.push_back({.fd = rests ? -1 : listener_.fd(), .events = POLLIN, .revents = 0});
    for (const Pending& one : pending_)
      fds.push_back({.fd = one.socket.fd(), .events = POLLIN, .revents = 0});
    ::poll(fds.data(), fds.size(), until.poll_timeout_ms());
  }

  // No room, and the oldest is not to be dropped yet.
  bool is_full() const { return pending_.size() >= most_pending_ && !pending_.front().grace.expired(); }

  // None when this process has no descriptor left: some may be closed soon.
  std::optional<net::UnixSocket> try_accept() {
    try {
      return listener_.try_accept();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kResource) throw;
      rest_ = Deadline::after(kGrace);
      return std::nullopt;
    }
  }

  void accept_some() {
    for (int i = 0; i < kAcceptsPerTurn && !is_full(); ++i) {
      auto socket = try_accept();
      if (!socket) return;
      if (!socket->trust_own_user()) continue;
      if (pending_.size() >= most_pending_) pending_.pop_front();  // it may call again
      pending_.push_back({.socket = std::move(*socket),
                          .handshake = net::HandshakeResponder(secret_, address_.binding()),
                          .until = Deadline::after(kProofPatience)});
    }
  }

  // kDone when it is not pending any more: dropped, or a caller now. Raises when it is a rank of this job
  // that cannot join.
  Attended attend(Pending& one) {
    net::HandshakeResponder::Step step;
    std::vector<base::Fd> fds;
    try {
      std::uint8_t buffer[net::kMaxPeerMessage];
      const std::size_t length = one.socket.receive(buffer, Deadline::now(), &fds);
      step = one.handshake.next({buffer, length});
      if (!step.send.empty()) one.socket.send(step.send, Deadline::now());
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) return Attended::kSilent;
      base::log(LogLevel::kInfo, base::cat("dropped a local connection: ", error.what()));
      return Attended::kDone;
    }
    if (!step.refusal.empty())
      base::log(LogLevel::kInfo, base::cat("dropped a local connection: ", step.refusal));
    if (step.introduction) welcome(std::move(one.socket), *step.introduction, std::move(fds));
    return step.introduction || !step.refusal.empty() ? Attended::kDone : Attended::kSent;
  }

  void welcome(net::UnixSocket socket, const Bytes& introduction, std::vector<base::Fd> fds) {
    const auto who = decode_introduction(introduction);
    if (!who) return;
    std::string why;
    if (who->version != own_.version) {
      why = base::cat("rank ", who->rank, " runs another version of lockstep than rank 0");
    } else if (who->size != own_.size) {
      why = base::cat("rank ", who->rank, " joins a group of ", who->size, " ranks, but rank 0 one of ",
                      own_.size);
    }
    if (!why.empty()) {
      const Failure failure{.kind = ErrorKind::kUsage, .message = why, .family = ErrorFamily::kBackend};
      send_refusal(socket, failure);
      base::raise(failure);
    }
    const bool here = who->same_process(own_);
    // It knows the key, so it belongs to the job; but a rank that is impossible or already there is dropped,
    // not an error: a retry of a rank whose first connection was lost must not end the meeting.
    if (who->rank < 1 || who->rank >= own_.size || callers_[static_cast<std::size_t>(who->rank)]) return;
    // What came counts, not what it says: the roster must describe the descriptors that will be sent with it.
    const bool with_process = fds.size() == 3;
    auto descriptors = take_descriptors(std::move(fds), here);
    if (!descriptors) return;
    Caller caller{.socket = std::move(socket),
                  .acquaintance = {.who = *who, .descriptors = std::move(*descriptors)}};
    if (!here) caller.acquaintance.who.has_process = with_process ? 1 : 0;
    const auto numbers = DescriptorNumbers::of(*options_.own).list();
    send_to(who->rank, [&] {
      caller.socket.send(net::encode_welcome(encode_introduction(own_)), options_.deadline,
                         here ? std::span<const int>() : std::span<const int>(numbers));
    });
    // After the welcome was sent: a rank that is listed has got rank 0's segment.
    attendance_in(*options_.own, options_).arrived[who->rank].store(1, std::memory_order_release);
    callers_[static_cast<std::size_t>(who->rank)] = std::move(caller);
  }

  // While no rank arrives: one may be on another host, have given up or have ended.
  void look_for_failures() {
    if (const auto elsewhere = look_up(store_, kElsewhereKey))
      raise_elsewhere(base::ByteReader(*elsewhere).get<std::int32_t>().value_or(-1), 0);
    for (std::size_t r = 1; r < callers_.size(); ++r) {
      if (callers_[r] && callers_[r]->socket.peer_closed()) raise_gone(static_cast<int>(r), "left or ended");
    }
  }

  // All rosters are sent before rank 0 maps anything itself: the others map in parallel with it.
  std::vector<LocalPeer> introduce_all() {
    std::vector<Introduction> all{own_};
    std::vector<DescriptorNumbers> descriptors{DescriptorNumbers::of(*options_.own)};
    std::vector<Mapping> here;  // until their descriptors are sent
    for (std::size_t r = 1; r < callers_.size(); ++r) {
      const Acquaintance& them = callers_[r]->acquaintance;
      all.push_back(them.who);
      if (!them.who.same_process(own_)) {
        const Descriptors& theirs = them.descriptors;
        descriptors.push_back({theirs.memory.get(), theirs.lifeline.get(), theirs.process.get()});
        continue;
      }
      // A thread of this process ends with it: the process's own descriptors stand for it.
      here.push_back(SegmentTable::of_process().find(them.who.segment));
      if (!here.back()) raise_gone(them.who.rank, "left");
      descriptors.push_back(DescriptorNumbers::of(*here.back()));
    }
    for (std::size_t r = 1; r < callers_.size(); ++r)
      send_to(all[r].rank,
              [&] { send_roster(callers_[r]->socket, all[r], all, descriptors, options_.deadline); });
    std::vector<LocalPeer> peers;
    peers.push_back(peer_of(own_, {.who = own_}));
    for (std::size_t r = 1; r < callers_.size(); ++r)
      peers.push_back(peer_of(own_, std::move(callers_[r]->acquaintance)));
    return peers;
  }

  KeyValue& store_;
  const MeetingOptions& options_;
  const Introduction own_;
  net::UnixListener listener_;
  const MeetingAddress address_;
  const JobSecret secret_;
  const std::size_t most_pending_ = most_pending();
  std::list<Pending> pending_;                  // the oldest first
  Deadline rest_ = Deadline::now();             // nobody is accepted before
  std::vector<std::optional<Caller>> callers_;  // by rank
};

}  // namespace

std::vector<LocalPeer> meet_as_server(KeyValue& store, const MeetingOptions& options) {
  return MeetingServer(store, options).run();
}

}  // namespace lockstep::local::internal
