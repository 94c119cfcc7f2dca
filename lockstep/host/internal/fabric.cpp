#include "lockstep/host/internal/fabric.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/base.h"
#include "lockstep/base/slow_wait.h"
#include "lockstep/host/internal/circle.h"
#include "lockstep/host/internal/place.h"
#include "lockstep/host/internal/push.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {
namespace {

// Of the communicator that made the fabric.
Board& first_board(const Peer& peer) {
  return *reinterpret_cast<Board*>(peer.segment->data() + peer.station->board_at);
}

// In the store: rank 0's address; the rank that found itself on another host than rank 0; and why rank 0 gave up, for
// those that come when it no longer listens.
constexpr const char* kAddressKey = "host/0";
constexpr const char* kElsewhereKey = "host/elsewhere";
constexpr const char* kGaveUpKey = "host/gave_up";
// How often one that waits looks whether it still makes sense.
constexpr Milliseconds kSlice{100};

std::string list(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 16;
  std::string words = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size() && i < kShown; ++i)
    words += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? fmt::format("{} and {} more", words, ranks.size() - kShown) : words;
}

// Raises what rank 0 said in the store, if it has, or that another rank gave up.
void check_gave_up(const lockstep_comm_config& config) {
  char words[768];
  std::size_t length = 0;
  const auto status = config.host->kv_get(config.host->context, kGaveUpKey, words, sizeof(words), &length,
                                          Deadline::after(Milliseconds(1)).monotonic_ns());
  if (status == LOCKSTEP_OK) {
    raise(ErrorKind::kPeerLost,
          fmt::format("rank 0 gave up: {}", std::string_view(words, std::min(length, sizeof(words)))),
          ErrorFamily::kBackend);
  }
  if (status == LOCKSTEP_PEER_LOST)
    raise(ErrorKind::kPeerLost, "another rank could not join", ErrorFamily::kBackend);
}

[[noreturn]] void raise_elsewhere(int rank, int from) {
  raise(ErrorKind::kUnsupported,
        fmt::format(
            "rank {} runs on another host or in another network namespace than rank {}; the host engine "
            "joins ranks of one host only",
            rank, from),
        ErrorFamily::kBackend);
}

[[noreturn]] void raise_gone(int rank, const char* how) {
  raise(Failure{.kind = ErrorKind::kPeerLost,
                .message = fmt::format("rank {} {} while the group was forming", rank, how),
                .family = ErrorFamily::kBackend,
                .peer = LostPeer{.rank = rank, .cause = how}});
}

}  // namespace

Fabric::Fabric(const lockstep_comm_config& config)
    : rank_(config.rank),
      identity_{.magic = kLayoutMagic, .rank = config.rank, .nonce = {}},
      arena_(
          std::make_unique<Arena>(config.name != nullptr ? config.name : "group", config.rank, config.size)),
      peers_(static_cast<std::size_t>(config.size)) {
  const std::string nonce = random_hex(sizeof(identity_.nonce) / 2);
  nonce.copy(identity_.nonce, sizeof(identity_.nonce));
  nonce.copy(own().nonce, sizeof(own().nonce));
  own().identity_at = reinterpret_cast<std::uintptr_t>(&identity_);
  own().board_at = arena_->offset_of(make_board(*arena_, config.rank, config.size));
}

std::unique_ptr<Fabric> Fabric::join(const lockstep_comm_config& config) {
  std::unique_ptr<Fabric> fabric(new Fabric(config));
  const Deadline deadline = Deadline::from_monotonic_ns(config.deadline_ns);
  try {
    const Introduction own = fabric->introduce(config.size);
    fabric->adopt(own, {.who = own, .descriptors = {}});
    if (config.size == 1) return fabric;
    if (config.rank == 0) {
      fabric->host_meeting(config, own, deadline);
    } else {
      fabric->attend_meeting(config, own, deadline);
    }
    fabric->check_kernel_copies();
    fabric->await_all(deadline);
  } catch (...) {
    fabric->say_left();
    throw;
  }
  return fabric;
}

Introduction Fabric::introduce(int size) {
  Introduction own{.rank = rank_,
                   .size = size,
                   .pid = ::getpid(),
                   .arena_bytes = arena_->size(),
                   .arena = local::SegmentTable::id_of(*arena_->segment()),
                   .has_process = 0,
                   .process = {}};
  local::OwnProcess::token().copy(own.process, sizeof(own.process) - 1);
  return own;
}

DescriptorNumbers Fabric::own_descriptors() {
  const auto process = local::OwnProcess::descriptors();
  return {.memory = arena_->segment()->fd(), .lifeline = process.lifeline, .process = process.pidfd};
}

// ---- rank 0 ----

void Fabric::host_meeting(const lockstep_comm_config& config, const Introduction& own, Deadline deadline) {
  auto listener = net::UnixListener::listen();
  const Address address{.host = host_identity(),
                        .process = own.process,
                        .socket = listener.name(),
                        .call = random_hex(16),
                        .answer = random_hex(16)};
  const Bytes card = address.encode();
  if (config.host->kv_set(config.host->context, kAddressKey, card.data(), card.size()) != LOCKSTEP_OK) {
    raise(ErrorKind::kSystem, "cannot publish this rank's address in the group's store",
          ErrorFamily::kBackend);
  }
  std::vector<std::optional<Caller>> callers(peers_.size());
  try {
    collect(listener, address, config, callers, deadline);
    std::vector<Introduction> all{own};
    std::vector<DescriptorNumbers> descriptors{own_descriptors()};
    const auto own_process = local::OwnProcess::descriptors();
    for (std::size_t r = 1; r < callers.size(); ++r) {
      const Acquaintance& them = callers[r]->acquaintance();
      all.push_back(them.who);
      const bool here = them.who.same_process(own);
      const auto segment = here ? local::SegmentTable::of_process().find(them.who.arena) : nullptr;
      if (here && !segment) raise_gone(them.who.rank, "left");
      // A thread of this process lives and dies with it.
      descriptors.push_back(here ? DescriptorNumbers{segment->fd(), own_process.lifeline, own_process.pidfd}
                                 : DescriptorNumbers{them.descriptors.memory.get(),
                                                     them.descriptors.lifeline.get(),
                                                     them.descriptors.process.get()});
      if (here) all.back().has_process = descriptors.back().process >= 0 ? 1 : 0;
    }
    for (std::size_t r = 1; r < callers.size(); ++r) callers[r]->tell(all, descriptors, deadline);
    for (std::size_t r = 1; r < callers.size(); ++r) adopt(own, callers[r]->take_acquaintance());
  } catch (...) {
    const Failure failure = current_failure();
    for (auto& caller : callers) {
      if (caller) caller->refuse(failure);
    }
    config.host->kv_set(config.host->context, kGaveUpKey, failure.message.data(), failure.message.size());
    throw;
  }
}

void Fabric::collect(net::UnixListener& listener, const Address& address, const lockstep_comm_config& config,
                     std::vector<std::optional<Caller>>& callers, Deadline deadline) {
  const Introduction me = introduce(size());
  own().arrived[0] = 1;
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = 1; r < size(); ++r) {
      if (!callers[static_cast<std::size_t>(r)]) ranks.push_back(r);
    }
    return list(ranks);
  };
  SlowWait slow(deadline);
  for (int n_came = 1; n_came < size();) {
    auto caller = Caller::accept(listener, address, std::min(deadline, Deadline::after(kSlice)));
    if (!caller) {
      look_for_failures(config, callers);
      slow.say_if_due([&] { return fmt::format("rank 0 waits for {} to join the group", missing()); });
      if (!deadline.expired()) continue;
      raise(ErrorKind::kTimeout, fmt::format("{} did not join the group in time", missing()),
            ErrorFamily::kBackend);
    }
    const Introduction& who = caller->acquaintance().who;
    if (who.size != size()) {
      const Failure failure{.kind = ErrorKind::kUsage,
                            .message = fmt::format("rank {} joins a group of {} ranks, but rank 0 one of {}",
                                                   who.rank, who.size, size()),
                            .family = ErrorFamily::kBackend};
      caller->refuse(failure);
      raise(failure);
    }
    if (who.rank < 1 || who.rank >= size() || callers[static_cast<std::size_t>(who.rank)]) continue;
    caller->welcome(address, me, own_descriptors(), deadline);
    own().arrived[who.rank].store(1, std::memory_order_release);
    callers[static_cast<std::size_t>(who.rank)] = std::move(caller);
    ++n_came;
  }
}

// While nobody comes: a rank may be elsewhere, have given up or have ended.
void Fabric::look_for_failures(const lockstep_comm_config& config,
                               std::vector<std::optional<Caller>>& callers) {
  std::int32_t elsewhere = -1;
  std::size_t length = 0;
  const auto status = config.host->kv_get(config.host->context, kElsewhereKey, &elsewhere, sizeof(elsewhere),
                                          &length, Deadline::after(Milliseconds(1)).monotonic_ns());
  if (status == LOCKSTEP_OK) raise_elsewhere(elsewhere, 0);
  if (status == LOCKSTEP_PEER_LOST)
    raise(ErrorKind::kPeerLost, "another rank could not join", ErrorFamily::kBackend);
  for (std::size_t r = 1; r < callers.size(); ++r) {
    if (callers[r] && callers[r]->gone()) raise_gone(static_cast<int>(r), "left or ended");
  }
}

// ---- the others ----

Address Fabric::address_of_first(const lockstep_comm_config& config, Deadline deadline) {
  std::uint8_t buffer[1024];
  std::size_t length = 0;
  const auto get = [&](Deadline until) {
    return config.host->kv_get(config.host->context, kAddressKey, buffer, sizeof(buffer), &length,
                               until.monotonic_ns());
  };
  SlowWait slow(deadline);
  auto status = get(slow.next());
  if (status == LOCKSTEP_TIMEOUT && !deadline.expired()) {
    slow.say_if_due([&] {
      return fmt::format("rank {} waits for rank 0 to join group \"{}\"", rank_,
                         config.name != nullptr ? config.name : "");
    });
    status = get(deadline);
  }
  if (status != LOCKSTEP_OK) {
    raise(status == LOCKSTEP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
          fmt::format("rank 0 did not join the group in time: rank {} waited for its address in the store",
                      rank_),
          ErrorFamily::kBackend);
  }
  const auto address = length <= sizeof(buffer) ? Address::decode({buffer, length}) : std::nullopt;
  if (!address) {
    raise(ErrorKind::kInternal,
          "rank 0 published an address this version cannot read; do all ranks run the same lockstep?",
          ErrorFamily::kBackend);
  }
  if (address->host == host_identity()) return *address;
  // Rank 0 would wait for this rank.
  config.host->kv_set(config.host->context, kElsewhereKey, &rank_, sizeof(rank_));
  raise_elsewhere(0, rank_);
}

// Nobody listens there while rank 0 is slow to answer, or when it has given up.
CallToFirst Fabric::connect_to_first(const lockstep_comm_config& config, const Address& address,
                                     const Introduction& own, const DescriptorNumbers& descriptors,
                                     Deadline deadline) {
  std::optional<CallToFirst> call;
  for (;;) {
    const Deadline slice = std::min(deadline, Deadline::after(kSlice));
    try {
      if (!call) call = CallToFirst::connect(address, slice);
      call->introduce(address, own, descriptors, slice);
      return std::move(*call);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerLost) check_gave_up(config);
      if (error.kind() != ErrorKind::kTimeout || deadline.expired()) throw;
    }
    check_gave_up(config);
  }
}

void Fabric::attend_meeting(const lockstep_comm_config& config, const Introduction& own, Deadline deadline) {
  const Address address = address_of_first(config, deadline);
  const bool here = address.process == own.process;
  auto call =
      connect_to_first(config, address, own, here ? DescriptorNumbers{} : own_descriptors(), deadline);
  try {
    adopt(own, call.rank_0(address, deadline));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerLost) check_gave_up(config);  // before it came to this call
    throw;
  }
  try {
    for (auto& them : call.roster(own, deadline)) {
      if (them.who.rank != 0 && them.who.rank != rank_) adopt(own, std::move(them));
    }
  } catch (const Error& error) {
    // Not when rank 0 says so: it has named them.
    if (error.kind() != ErrorKind::kTimeout || !deadline.expired() ||
        error.failure().family != ErrorFamily::kNetwork)
      throw;
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (peer(0).station->arrived[r].load(std::memory_order_acquire) == 0) missing.push_back(r);
    }
    if (missing.empty()) missing.push_back(0);
    raise(ErrorKind::kTimeout, fmt::format("{} did not join the group in time", list(missing)),
          ErrorFamily::kBackend);
  }
  for (int r = 0; r < size(); ++r) {
    if (peer(r).station == nullptr)
      raise(ErrorKind::kInternal, fmt::format("rank 0 did not tell of rank {}", r), ErrorFamily::kBackend);
  }
}

// ---- all ----

void Fabric::adopt(const Introduction& own, Acquaintance them) {
  const int rank = them.who.rank;
  local::Mapping segment;
  const bool here = them.who.same_process(own);
  if (here) {
    segment = local::SegmentTable::of_process().find(them.who.arena);
    if (!segment) raise_gone(rank, "left");
  } else {
    segment = local::SegmentTable::of_process().map(std::move(them.descriptors.memory), them.who.arena_bytes);
  }
  auto* station = reinterpret_cast<Station*>(segment->data());
  const std::uint64_t room = segment->size();
  if (rank < 0 || rank >= size() || room < kHeapAt || station->magic != kLayoutMagic ||
      station->rank != rank || station->board_at < kHeapAt || station->board_at > room ||
      Board::bytes(size()) > room - station->board_at) {
    raise(ErrorKind::kInternal, fmt::format("the arena of rank {} is not laid out as expected", rank),
          ErrorFamily::kBackend);
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.station = station;
  peer.segment = std::move(segment);
  peer.same_process = here;
  peer.pid = them.who.pid;
  if (here) return;
  peer.process =
      local::PeerProcess(std::move(them.descriptors.process), std::move(them.descriptors.lifeline));
  // The kernel's word on who is behind the descriptor, as a pid that is seen from here. A process in a pid namespace that
  // is not has none: its memory is out of reach.
  const std::int64_t pid = peer.process.pid();
  peer.vouched = pid > 0;
  if (peer.vouched) peer.pid = pid;
}

void Fabric::check_kernel_copies() {
  bool work = !environment_flag(Var::kLockstepStagedOnly);
  for (int r = 0; r < size() && work; ++r) work = peer(r).same_process || kernel_copies_work(peer(r), r);
  // One will do: the others are processes of the same user, seen through the same /proc.
  const auto other = std::ranges::find_if(peers_, [](const Peer& each) { return !each.same_process; });
  work = work && (other == peers_.end() || calls_are_visible(*other));
  own().kernel_copies.store(work ? 1 : 0, std::memory_order_relaxed);
}

// Others that were quicker may have joined already and count on this rank.
void Fabric::say_left() {
  const auto left = current_failure().kind == ErrorKind::kPeerLost ? Board::kAfterAnother : Board::kLeft;
  reinterpret_cast<Board*>(arena_->base() + own().board_at)->left.store(left, std::memory_order_seq_cst);
  for (const Peer& peer : peers_) {
    if (peer.station != nullptr) local::wake(peer.station->doorbell);
  }
}

// Names who was gone first: a rank that left after another did so when it had seen that one, so whoever sees the second
// and looks again sees the first.
void Fabric::check_all_there() {
  std::optional<int> second;
  do {
    const bool again = second.has_value();
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      const auto left = first_board(peer(r)).left.load(std::memory_order_seq_cst);
      if (left == Board::kAfterAnother) {
        second = r;
      } else if (left != Board::kHere) {
        raise_gone(r, "left");
      } else if (peer(r).process.lost()) {
        raise_gone(r, "ended");
      }
    }
    if (again) raise_gone(*second, "left");
  } while (second);
}

// Nobody may leave before everybody has mapped everybody. The last one to come wakes the others.
void Fabric::await_all(Deadline deadline) {
  std::atomic<std::uint32_t>& n_joined = peer(0).station->n_joined;
  const auto all = static_cast<std::uint32_t>(size());
  if (n_joined.fetch_add(1, std::memory_order_seq_cst) + 1 == all) {
    for (const Peer& peer : peers_) local::wake(peer.station->doorbell);
    return;
  }
  for (;;) {
    const std::uint32_t ticket = local::announce(own().doorbell);
    const bool over = n_joined.load(std::memory_order_seq_cst) == all;
    if (!over) local::sleep(own().doorbell, ticket, std::min(deadline, Deadline::after(kSlice)));
    local::retract(own().doorbell);
    if (over || n_joined.load(std::memory_order_acquire) == all) return;
    check_all_there();
    if (deadline.expired())
      raise(ErrorKind::kTimeout, "some ranks did not finish joining the group in time",
            ErrorFamily::kBackend);
  }
}

}  // namespace lockstep::comm::internal
