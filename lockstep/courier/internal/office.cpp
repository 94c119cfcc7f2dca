#include "lockstep/courier/internal/office.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::courier::internal {
namespace {

// A worker may hear from another before it is told of it.
constexpr Milliseconds kGuestPatience{30'000};
// Connections of those who have not proven that they belong to the job, and how long one may take while others wait.
constexpr std::size_t kMostStrangers = 64;
constexpr Milliseconds kStrangerGrace{100};
// Every sender's outbox is mapped by every receiver: 1024 of them must fit into the address space.
constexpr std::uint64_t kMaxOutbox = std::uint64_t{64} << 30;

std::uint64_t outbox_bytes() {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  return std::min(pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)), kMaxOutbox);
}

Inbox make_inbox() {
  Inbox inbox(local::SegmentTable::of_process().create("lockstep-inbox", kInboxBytes));
  inbox.mapping()->commit(0, kInboxPage);
  return inbox;
}

}  // namespace

Failure lost_failure(const Peer& peer, const LostPeer& lost) {
  return {.kind = ErrorKind::kPeerLost,
          .message = base::cat("worker ", peer.name, " (", peer.id, ") is gone: ", lost.cause),
          .family = ErrorFamily::kNetwork,
          .peer = lost};
}

Office::Office(HostCourierOptions with, Endpoint me)
    : options(std::move(with)),
      self(std::move(me)),
      inbox(make_inbox()),
      outbox(outbox_bytes()),
      door(inbox, reactor.fd(), [this] { return anything_ready(); }),
      slots(inbox) {}

void Office::deliver(Event event) {
  {
    const std::lock_guard lock(ready_mutex_);
    ready_.push_back(std::move(event));
    n_ready_.fetch_add(1, std::memory_order_seq_cst);
  }
  door.knock();
}

std::optional<Event> Office::next_ready() {
  if (!anything_ready()) return std::nullopt;
  const std::lock_guard lock(ready_mutex_);
  if (ready_.empty()) return std::nullopt;
  Event event = std::move(ready_.front());
  ready_.pop_front();
  n_ready_.fetch_sub(1, std::memory_order_seq_cst);
  return event;
}

std::shared_ptr<Peer> Office::find(WorkerId id) {
  const std::lock_guard lock(peers_mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Peer>> Office::peers() {
  std::vector<std::shared_ptr<Peer>> all;
  const std::lock_guard lock(peers_mutex_);
  for (const auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

std::shared_ptr<Peer> Office::add(WorkerId id, const std::string& name, Endpoint endpoint) {
  const auto before = find(id);
  if (before) {
    const std::lock_guard lock(before->mutex);
    if (!before->lost && !before->removed) {
      base::raise(ErrorKind::kUsage, base::cat("worker ", id, " (", before->name, ") is a peer already"));
    }
    if (before->out) before->out->end(false);
    before->out = nullptr;
    count_queue(*before);
  }
  auto peer = std::make_shared<Peer>(id, name, std::move(endpoint));
  const std::lock_guard lock(peers_mutex_);
  auto& place = peers_[id];
  if (place != before) base::raise(ErrorKind::kUsage, base::cat("worker ", id, " was added twice at once"));
  place = peer;
  return peer;
}

void Office::count_queue(Peer& peer) noexcept {
  const bool now = peer.out && !peer.out->idle();
  if (now == peer.queued) return;
  peer.queued = now;
  queued.fetch_add(now ? 1 : -1, std::memory_order_relaxed);
}

// What came before goes out first; then, once, that it is lost.
void Office::lose(const std::shared_ptr<Peer>& peer, const std::string& cause) noexcept {
  {
    const std::lock_guard lock(peer->mutex);
    if (peer->lost) return;
  }
  for (const auto& guest : incoming()) {
    if (guest->peer() == peer) guest->drain();
  }
  {
    const std::lock_guard lock(peer->mutex);
    if (peer->out) peer->out->end(true);
    peer->out = nullptr;
    count_queue(*peer);
    peer->lost = LostPeer{.rank = peer->id, .pid = peer->endpoint.pid, .cause = cause};
    if (peer->removed) return;
  }
  deliver({.what = Event::What::kLost, .from = peer->id, .cause = cause});
}

std::shared_ptr<Peer> Office::known(const Intro& intro) {
  auto peer = find(intro.id);
  if (!peer || peer->endpoint.token != intro.token) return nullptr;
  const std::lock_guard lock(peer->mutex);
  return peer->lost ? nullptr : peer;
}

void Office::admit(std::shared_ptr<Incoming> guest, std::uint64_t origin) {
  guests_.push_back({.who = guest,
                     .origin = origin,
                     .fresh = Deadline::after(kStrangerGrace),
                     .until = Deadline::after(kGuestPatience)});
  incoming_.push_back(std::move(guest));
  count_guests();
}

void Office::count_guests() noexcept {
  n_guests_.store(guests_.size() + resting_.size(), std::memory_order_relaxed);
}

// Compares all with all: they are few, and nothing here may want memory.
const Office::Guest* Office::next_to_go(std::size_t& n_strangers) const noexcept {
  const auto is_stranger = [](const Guest& guest) {
    const auto who = guest.who.lock();
    return who && who->is_stranger();
  };
  const Guest* next = nullptr;
  std::ptrdiff_t most = 0;
  n_strangers = 0;
  for (const Guest& guest : guests_) {
    if (!is_stranger(guest)) continue;
    ++n_strangers;
    const auto n = std::ranges::count(guests_, guest.origin, &Guest::origin);
    if (n > most) next = &guest;
    most = std::max(most, n);
  }
  return next;
}

bool Office::has_room_for_stranger() noexcept {
  std::size_t n = 0;
  const Guest* next = next_to_go(n);
  if (n < kMostStrangers) return true;
  if (!next->fresh.expired()) return false;
  expel_stranger();
  return true;
}

void Office::expel_stranger() noexcept {
  std::size_t n = 0;
  const Guest* next = next_to_go(n);
  if (next == nullptr) return;
  if (const auto who = next->who.lock()) who->end();
}

void Office::rest(std::weak_ptr<Doorway> doorway) {
  resting_.push_back(std::move(doorway));
  count_guests();
}

void Office::wake_doorways() noexcept {
  const auto doorways = std::exchange(resting_, {});
  count_guests();
  for (const auto& one : doorways) {
    if (const auto doorway = one.lock()) doorway->go_on();
  }
}

void Office::forget(const Incoming* guest) noexcept {
  std::erase_if(guests_, [&](const Guest& one) {
    const auto who = one.who.lock();
    return !who || who.get() == guest;
  });
  count_guests();
  std::erase_if(incoming_, [&](const auto& one) { return one.get() == guest; });
}

void Office::let_in_guests() noexcept {
  const auto waiting = guests_;
  for (const Guest& guest : waiting) {
    const auto who = guest.who.lock();
    if (!who || !who->waiting()) continue;
    auto peer = known(*who->waiting());
    if (!peer) continue;
    std::erase_if(guests_, [&](const Guest& one) { return one.who.lock() == who; });
    who->let_in(std::move(peer));
  }
  count_guests();
  wake_doorways();
}

void Office::expire_guests() noexcept {
  const auto waiting = guests_;
  for (const Guest& guest : waiting) {
    const auto who = guest.who.lock();
    if (!guest.until.expired() || !who) continue;
    const auto& intro = who->waiting();
    const std::string why =
        intro ? base::cat("worker ", intro->id, " is not known here") : std::string("it took too long");
    if (complaints.allowed()) {
      base::log(LogLevel::kWarn,
                base::cat("courier ", options.name, ": refused a connection: ", why, complaints.held_back()));
    }
    who->refuse(why);
  }
  wake_doorways();
}

void Office::count_tcp(int change) {
  const int now = n_tcp_.fetch_add(change, std::memory_order_relaxed) + change;
  if ((now > 0) != (now - change > 0)) door.sockets_are_polled(now > 0);
}

}  // namespace lockstep::courier::internal
