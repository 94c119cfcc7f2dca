#include "lockstep/host/internal/fabric.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "lockstep/base/base.h"
#include "lockstep/base/slow_wait.h"
#include "lockstep/host/internal/circle.h"
#include "lockstep/host/internal/doorbell.h"
#include "lockstep/host/internal/place.h"

namespace lockstep::comm::internal {
namespace {

// Segments of ranks that are threads of this process, by nonce. The one process-wide table of the engine: without it
// two rank threads would map the same memory twice.
class LocalSegments {
 public:
  void add(const std::string& nonce, const std::shared_ptr<net::Segment>& segment) {
    const std::lock_guard lock(mutex_);
    std::erase_if(segments_, [](const auto& entry) { return entry.second.expired(); });
    segments_[nonce] = segment;
  }
  std::shared_ptr<net::Segment> find(const std::string& nonce) {
    const std::lock_guard lock(mutex_);
    const auto found = segments_.find(nonce);
    return found == segments_.end() ? nullptr : found->second.lock();
  }
  static LocalSegments& instance() {
    static LocalSegments table;
    return table;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<net::Segment>> segments_;
};

// Tells this process from others, also after a fork: the random part is then the same, and in another pid namespace the
// pid may be.
std::string process_token() {
  static const std::string random = random_hex(16);
  struct stat ns {};
  if (::stat("/proc/self/ns/pid", &ns) != 0) raise(system_failure(errno, "stat of /proc/self/ns/pid"));
  return fmt::format("{}.{}.{}", random, ns.st_ino, ::getpid());
}

// The message both ends of a new connection send, with the arena's descriptor.
struct Greeting {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::uint64_t arena_bytes;
  char nonce[32];  // the receiver's, as read from the store
};

// Of the communicator that made the fabric.
Board& first_board(const Peer& peer) {
  return *reinterpret_cast<Board*>(peer.segment->data() + peer.station->board_at);
}

std::string key_of(int rank) {
  return fmt::format("host/{}", rank);
}

}  // namespace

struct Fabric::Card {
  std::string host, process, socket, nonce;
  std::int64_t pid = -1;

  Bytes encode() const {
    ByteWriter out;
    out.put(kLayoutVersion).put(pid).sized(host).sized(process).sized(socket).sized(nonce);
    return out.take();
  }
  static std::optional<Card> decode(std::span<const std::uint8_t> bytes) {
    ByteReader in(bytes);
    if (in.get<std::uint32_t>() != kLayoutVersion) return std::nullopt;
    const auto pid = in.get<std::int64_t>();
    const auto host = in.sized(), process = in.sized(), socket = in.sized(), nonce = in.sized();
    if (!pid || !host || !process || !socket || !nonce || nonce->size() != 32) return std::nullopt;
    return Card{to_text(*host), to_text(*process), to_text(*socket), to_text(*nonce), *pid};
  }
};

Fabric::Fabric(const lockstep_comm_config& config)
    : rank_(config.rank),
      nonce_(random_hex(16)),
      identity_{.magic = kLayoutMagic, .rank = config.rank, .nonce = {}},
      arena_(
          std::make_unique<Arena>(config.name != nullptr ? config.name : "group", config.rank, config.size)),
      peers_(static_cast<std::size_t>(config.size)) {
  std::memcpy(identity_.nonce, nonce_.data(), sizeof(identity_.nonce));
  std::memcpy(own().nonce, nonce_.data(), sizeof(own().nonce));
  own().identity_at = reinterpret_cast<std::uintptr_t>(&identity_);
  own().board_at = arena_->offset_of(make_board(*arena_, config.rank, config.size));
}

std::unique_ptr<Fabric> Fabric::join(const lockstep_comm_config& config) {
  std::unique_ptr<Fabric> fabric(new Fabric(config));
  try {
    fabric->meet(config, Deadline::from_monotonic_ns(config.deadline_ns));
  } catch (...) {
    fabric->say_left();
    throw;
  }
  return fabric;
}

void Fabric::meet(const lockstep_comm_config& config, Deadline deadline) {
  Card card_here{.host = host_identity(), .process = process_token(), .nonce = nonce_, .pid = ::getpid()};
  LocalSegments::instance().add(nonce_, arena_->segment());
  adopt(rank_, card_here, arena_->segment(), {});
  if (size() == 1) return;
  auto listener = net::UnixListener::listen();
  card_here.socket = listener.name();
  const Bytes card = card_here.encode();
  if (config.host->kv_set(config.host->context, key_of(rank_).c_str(), card.data(), card.size()) !=
      LOCKSTEP_OK) {
    raise(ErrorKind::kSystem, "cannot publish this rank's address in the group's store",
          ErrorFamily::kBackend);
  }
  std::vector<Card> cards(peers_.size());
  int to_accept = 0;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    cards[static_cast<std::size_t>(r)] = card_of(config, r, deadline);
    const Card& theirs = cards[static_cast<std::size_t>(r)];
    if (theirs.host != card_here.host) {
      raise(ErrorKind::kUnsupported,
            fmt::format(
                "rank {} runs on another host or in another network namespace than rank {}; the host engine "
                "joins ranks of one host only",
                r, rank_),
            ErrorFamily::kBackend);
    }
    if (theirs.process != card_here.process && r > rank_) ++to_accept;
  }
  // Higher ranks call lower ones; rank 0 only answers, so no circle of waiting ranks can form.
  for (int r = 0; r < size(); ++r) {
    const Card& theirs = cards[static_cast<std::size_t>(r)];
    if (r == rank_) continue;
    if (theirs.process == card_here.process) {
      auto segment = LocalSegments::instance().find(theirs.nonce);
      if (!segment)
        raise(ErrorKind::kPeerLost, fmt::format("rank {} left while the group was forming", r),
              ErrorFamily::kBackend);
      adopt(r, theirs, std::move(segment), {});
    } else if (r < rank_) {
      auto socket = net::UnixSocket::connect(theirs.socket, deadline);
      exchange(socket, r, theirs, deadline);
    }
  }
  while (to_accept-- > 0) accept_one(listener, cards, deadline);
  await_all(deadline);
}

// Others that were quicker may have joined already and count on this rank.
void Fabric::say_left() {
  reinterpret_cast<Board*>(arena_->base() + own().board_at)->left.store(1, std::memory_order_seq_cst);
  for (const Peer& peer : peers_) {
    if (peer.station != nullptr) ring(peer.station->doorbell);
  }
}

// Nobody may leave before everybody has mapped everybody.
void Fabric::await_all(Deadline deadline) {
  bool kernel_copies = !environment_flag(Var::kLockstepStagedOnly);
  for (int r = 0; r < size() && kernel_copies; ++r)
    kernel_copies = peer(r).same_process || kernel_copies_work(peer(r), r);
  own().kernel_copies.store(kernel_copies ? 1 : 0, std::memory_order_relaxed);
  own().joined.store(1, std::memory_order_release);
  SlowWait slow(deadline);
  for (int r = 0; r < size(); ++r) {
    while (peer(r).station->joined.load(std::memory_order_acquire) == 0) {
      const bool ended = peer(r).socket && peer(r).socket.peer_closed();
      if (ended || first_board(peer(r)).left.load(std::memory_order_acquire) != 0) {
        raise(ErrorKind::kPeerLost,
              fmt::format("rank {} {} while the group was forming", r, ended ? "ended" : "left"),
              ErrorFamily::kBackend);
      }
      if (deadline.expired()) {
        raise(ErrorKind::kTimeout, fmt::format("rank {} did not finish joining the group in time", r),
              ErrorFamily::kBackend);
      }
      slow.say_if_due([&] {
        return fmt::format("rank {} waits for rank {} (pid {}) to finish joining the group", rank_, r,
                           peer(r).station->pid);
      });
      ::usleep(50);
    }
  }
}

Fabric::Card Fabric::card_of(const lockstep_comm_config& config, int rank, Deadline deadline) {
  std::uint8_t buffer[1024];
  std::size_t length = 0;
  const auto get = [&](Deadline until) {
    return config.host->kv_get(config.host->context, key_of(rank).c_str(), buffer, sizeof(buffer), &length,
                               until.monotonic_ns());
  };
  SlowWait slow(deadline);
  auto status = get(slow.next());
  if (status == LOCKSTEP_TIMEOUT && !deadline.expired()) {
    slow.say_if_due([&] {
      return fmt::format("rank {} waits for rank {} to join group \"{}\"", rank_, rank,
                         config.name != nullptr ? config.name : "");
    });
    status = get(deadline);
  }
  if (status != LOCKSTEP_OK) {
    raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
          fmt::format("rank {} did not join the group in time: rank {} waited for its address in the store",
                      rank, rank_),
          ErrorFamily::kBackend);
  }
  const auto card = length <= sizeof(buffer) ? Card::decode({buffer, length}) : std::nullopt;
  if (!card) {
    raise(ErrorKind::kInternal,
          fmt::format(
              "rank {} published an address this version cannot read; do all ranks run the same lockstep?",
              rank),
          ErrorFamily::kBackend);
  }
  return *card;
}

void Fabric::exchange(net::UnixSocket& socket, int rank, const Card& theirs, Deadline deadline) {
  const auto stranger = [&] {
    raise(ErrorKind::kSystem, fmt::format("whoever answered for rank {} is not of this job", rank),
          ErrorFamily::kBackend);
  };
  // Before anything is sent: with the descriptor goes the arena.
  if (socket.peer().uid != ::geteuid()) stranger();
  Greeting greeting{.magic = kLayoutMagic,
                    .version = kLayoutVersion,
                    .rank = rank_,
                    .arena_bytes = arena_->size(),
                    .nonce = {}};
  std::memcpy(greeting.nonce, theirs.nonce.data(), sizeof(greeting.nonce));
  const int fd = arena_->segment()->fd();
  socket.send({reinterpret_cast<const std::uint8_t*>(&greeting), sizeof(greeting)}, deadline, {&fd, 1});
  Greeting answer{};
  std::vector<Fd> fds;
  const std::size_t length =
      socket.receive({reinterpret_cast<std::uint8_t*>(&answer), sizeof(answer)}, deadline, &fds);
  const bool good = length == sizeof(answer) && answer.magic == kLayoutMagic &&
                    answer.version == kLayoutVersion && answer.rank == rank && fds.size() == 1 &&
                    std::memcmp(answer.nonce, nonce_.data(), 32) == 0;
  if (!good) stranger();
  auto segment = std::make_shared<net::Segment>(net::Segment::from_fd(std::move(fds[0]), answer.arena_bytes));
  adopt(rank, theirs, std::move(segment), std::move(socket));
}

// Takes the next good caller; strangers are dropped.
void Fabric::accept_one(net::UnixListener& listener, std::vector<Card>& cards, Deadline deadline) {
  for (;;) {
    auto socket = listener.accept(deadline);
    if (socket.peer().uid != ::geteuid()) continue;
    Greeting call{};
    std::vector<Fd> fds;
    // A stranger that connects and says nothing must not hold up the others for long.
    const Deadline patience = std::min(deadline, Deadline::after(Milliseconds(2000)));
    try {
      const std::size_t length =
          socket.receive({reinterpret_cast<std::uint8_t*>(&call), sizeof(call)}, patience, &fds);
      if (length != sizeof(call) || call.magic != kLayoutMagic || call.version != kLayoutVersion ||
          fds.size() != 1)
        continue;
    } catch (const Error& error) {
      log(LogLevel::kInfo, fmt::format("dropped a local connection: {}", error.what()));
      continue;
    }
    const bool good = call.rank > rank_ && call.rank < size() && peer(call.rank).station == nullptr &&
                      std::memcmp(call.nonce, nonce_.data(), 32) == 0;
    if (!good) continue;
    const Card& theirs = cards[static_cast<std::size_t>(call.rank)];
    auto segment = std::make_shared<net::Segment>(net::Segment::from_fd(std::move(fds[0]), call.arena_bytes));
    Greeting answer{.magic = kLayoutMagic,
                    .version = kLayoutVersion,
                    .rank = rank_,
                    .arena_bytes = arena_->size(),
                    .nonce = {}};
    std::memcpy(answer.nonce, theirs.nonce.data(), sizeof(answer.nonce));
    const int fd = arena_->segment()->fd();
    socket.send({reinterpret_cast<const std::uint8_t*>(&answer), sizeof(answer)}, deadline, {&fd, 1});
    return adopt(call.rank, theirs, std::move(segment), std::move(socket));
  }
}

void Fabric::adopt(int rank, const Card& card, std::shared_ptr<net::Segment> segment,
                   net::UnixSocket socket) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  auto* station = reinterpret_cast<Station*>(segment->data());
  const std::uint64_t room = segment->size();
  if (room < kHeapAt || station->magic != kLayoutMagic || station->rank != rank ||
      station->board_at < kHeapAt || station->board_at > room ||
      Board::bytes(size()) > room - station->board_at) {
    raise(ErrorKind::kInternal, fmt::format("the arena of rank {} is not laid out as expected", rank),
          ErrorFamily::kBackend);
  }
  peer.station = station;
  peer.segment = std::move(segment);
  peer.same_process = !socket;
  peer.pid = card.pid;
  if (socket) {
    // The kernel's word on who is there, as a pid of this namespace. A process that has none here shows as 0: then its
    // memory is out of reach, and only the socket tells of its end.
    const auto pid = socket.peer().pid;
    peer.vouched = pid > 0;
    if (peer.vouched) peer.pid = pid;
    if (peer.vouched) peer.pidfd = open_pidfd(pid);
    peer.socket = std::move(socket);
  }
}

}  // namespace lockstep::comm::internal
