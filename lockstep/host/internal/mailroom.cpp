#include "lockstep/host/internal/mailroom.h"

#include <algorithm>
#include <bitset>
#include <new>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/push.h"

namespace lockstep::comm::internal {
namespace {

constexpr std::uint64_t kClaimChunk = 128 << 10;

}  // namespace

void Mailroom::submit(Letter& letter) {
  (letter.is_send() ? sends_ : reads_).push_back(&letter);
}

void Mailroom::advance() {
  const auto drop_over = [&] { reads_.remove_if([](const Letter* letter) { return letter->over; }); };
  try {
    advance_sends();
    for (Letter* letter : reads_) advance_read(*letter);
  } catch (...) {
    drop_over();  // their owners will not keep them
    throw;
  }
  drop_over();
  if (!withdrawn_.empty()) sweep();
}

// Letters to one rank must be put into its outbox in order: one that finds no slot holds the later ones back.
void Mailroom::advance_sends() {
  std::bitset<kMaxRanks> full;
  for (auto it = sends_.begin(); it != sends_.end();) {
    Letter& letter = **it;
    const auto to = static_cast<std::size_t>(letter.op.root);
    if (letter.offer != nullptr) {
      advance_send(letter);
    } else if (full[to] || !post_envelope(letter)) {
      full[to] = true;
    }
    it = letter.over ? sends_.erase(it) : std::next(it);
  }
}

// What came before anyone asked is looked at first.
void Mailroom::advance_read(Letter& letter) {
  if (letter.taken && !letter.over) return advance_receive(letter);
  for (int r = 0; r < circle_.size() && !letter.over && !letter.taken; ++r) {
    if (letter.op.root >= 0 && letter.op.root != r) continue;
    if (!take_stranger(letter, r)) collect(r);
  }
}

bool Mailroom::withdraw(Letter& letter) {
  if (letter.is_send() && letter.offer != nullptr) {
    std::uint32_t offered = Offer::kOffered;
    if (!letter.offer->state.compare_exchange_strong(offered, Offer::kWithdrawn)) return false;
    withdrawn_.push_back(letter.offer);
  } else if (letter.taken) {
    return false;
  }
  sends_.remove(&letter);
  reads_.remove(&letter);
  return true;
}

void Mailroom::forget(Letter& letter) {
  sends_.remove(&letter);
  reads_.remove(&letter);
  give_up(letter);
  await_out(letter, Deadline::now());
}

void Mailroom::clear() {
  for (const auto* letters : {&sends_, &reads_}) {
    for (Letter* letter : *letters) give_up(*letter);
  }
  const Deadline since = Deadline::now();
  for (const auto* letters : {&sends_, &reads_}) {
    for (Letter* letter : *letters) await_out(*letter, since);
  }
  sends_.clear();
  reads_.clear();
}

void Mailroom::give_up(Letter& letter) {
  if (letter.offer == nullptr) return;
  std::uint32_t offered = Offer::kOffered;
  if (letter.is_send() && letter.offer->state.compare_exchange_strong(offered, Offer::kWithdrawn)) return;
  letter.offer->given_up.store(1, std::memory_order_seq_cst);
}

void Mailroom::await_out(const Letter& letter, Deadline since) {
  if (letter.offer == nullptr) return;
  const auto& other = letter.is_send() ? letter.offer->receiver_inside : letter.offer->sender_inside;
  const auto inside = [&] { return other.load(std::memory_order_seq_cst) != 0; };
  take_back(circle_, letter.peer, letter.op.recv, letter.is_send() ? 0 : letter.n_bytes, inside, since);
}

bool Mailroom::wanted(const Offer& offer) {
  return offer.given_up.load(std::memory_order_seq_cst) == 0 &&
         circle_.own().broken.load(std::memory_order_relaxed) == 0;
}

bool Mailroom::copy_rest(Letter& letter, const Place& to, const Place& from) {
  const Inside inside(letter);
  while (wanted(*letter.offer)) {
    const std::uint64_t n = std::min(kClaimChunk, letter.n_bytes - letter.moved);
    if (n == 0) return true;
    perturb();
    copy(to + letter.moved, from + letter.moved, n, letter.n_bytes);
    letter.moved += n;
    ++letter.mark;
  }
  return false;
}

// ---- sending ----

Outbox* Mailroom::outbox_to(int rank) {
  auto& where = circle_.own().outboxes()[rank];
  std::uint64_t at = where.load(std::memory_order_relaxed);
  if (at == 0) {
    void* memory = circle_.arena().allocate(sizeof(Outbox));
    circle_.keep_until_departed(memory);
    new (memory) Outbox();
    at = circle_.arena().offset_of(memory);
    where.store(at, std::memory_order_seq_cst);
  }
  return reinterpret_cast<Outbox*>(circle_.arena().base() + at);
}

// False when there is no slot.
bool Mailroom::post_envelope(Letter& letter) {
  Outbox& box = *outbox_to(letter.op.root);
  const std::uint64_t sent = box.sent.load(std::memory_order_relaxed);
  if (sent - box.taken.load(std::memory_order_acquire) >= kMailSlots) return false;
  Envelope& envelope = box.slots[sent % kMailSlots];
  envelope.n_bytes = letter.n_bytes;
  envelope.tag = letter.op.tag;
  envelope.dtype = letter.op.dtype;
  envelope.offer_at = 0;
  const bool brief = letter.n_bytes <= kMailBytes;
  if (brief) {
    copy_bytes(box.payload[sent % kMailSlots], letter.op.send, letter.n_bytes);
  } else {
    letter.offer = new_offer(letter);
    envelope.offer_at = circle_.arena().offset_of(letter.offer);
  }
  perturb();
  box.sent.store(sent + 1, std::memory_order_seq_cst);
  circle_.ring(letter.op.root);
  ++letter.mark;
  if (brief) end(letter);
  return true;
}

Offer* Mailroom::new_offer(const Letter& letter) {
  Offer* offer = nullptr;
  if (free_offers_.empty()) {
    void* memory = circle_.arena().allocate(sizeof(Offer));
    circle_.keep_until_departed(memory);
    offer = new (memory) Offer();
  } else {
    offer = free_offers_.back();
    free_offers_.pop_back();
  }
  offer->send_reach = publish(circle_, letter.op.send, letter.n_bytes, offer->send_at, letter.op.root);
  offer->n_bytes = letter.n_bytes;
  offer->pipe_at = 0;
  offer->laid.store(0, std::memory_order_relaxed);
  offer->drained.store(0, std::memory_order_relaxed);
  offer->claims.next.store(0, std::memory_order_relaxed);
  offer->claims.done.store(0, std::memory_order_relaxed);
  offer->given_up.store(0, std::memory_order_relaxed);
  offer->state.store(Offer::kOffered, std::memory_order_release);
  return offer;
}

void Mailroom::advance_send(Letter& letter) {
  Offer& offer = *letter.offer;
  perturb();
  const std::uint32_t state = offer.state.load(std::memory_order_acquire);
  if (state == Offer::kOffered) return;
  if (!letter.taken) letter.taken = true, ++letter.mark;
  if (state == Offer::kTaken) {
    if (offer.mode == Offer::kBoth) copy_claimed(letter);
    if (offer.mode == Offer::kPipe) fill_pipe(letter);
    if (offer.mode == Offer::kPush && letter.moved < letter.n_bytes) {
      const auto to = find(circle_, letter.op.root, offer.recv_reach, offer.recv_at, letter.n_bytes);
      if (!to || to->here == nullptr) {
        return end(letter,
                   Failure{.kind = ErrorKind::kInternal,
                           .message = base::cat("rank ", letter.op.root, " named a buffer outside its arena"),
                           .family = ErrorFamily::kBackend});
      }
      if (!copy_rest(letter, *to, own_place(letter.op.send))) return;
      offer.laid.store(letter.n_bytes, std::memory_order_seq_cst);
      circle_.ring(letter.op.root);
    }
    return;
  }
  recycle(letter);
  end(letter);
}

void Mailroom::open_pipe(Letter& letter) {
  if (letter.pipe != nullptr) return;
  if (free_pipes_.empty()) {
    void* memory = circle_.arena().allocate(kPipeChunk * kPipeChunks);
    circle_.keep_until_departed(memory);
    free_pipes_.push_back(static_cast<std::uint8_t*>(memory));
  }
  letter.pipe = free_pipes_.back();
  free_pipes_.pop_back();
  letter.offer->pipe_at = circle_.arena().offset_of(letter.pipe);
}

void Mailroom::fill_pipe(Letter& letter) {
  Offer& offer = *letter.offer;
  open_pipe(letter);
  const auto* from = static_cast<const std::uint8_t*>(letter.op.send);
  while (letter.moved < letter.n_bytes) {
    const std::uint64_t drained = offer.drained.load(std::memory_order_acquire);
    if (letter.moved - drained > kPipeChunk * (kPipeChunks - 1)) return;
    const std::uint64_t n = std::min<std::uint64_t>(kPipeChunk, letter.n_bytes - letter.moved);
    copy_bytes(letter.pipe + letter.moved % (kPipeChunk * kPipeChunks), from + letter.moved, n);
    letter.moved += n;
    ++letter.mark;
    perturb();
    offer.laid.store(letter.moved, std::memory_order_seq_cst);
    circle_.ring(letter.op.root);
  }
}

// The receiver will not look at the offer again.
void Mailroom::recycle(Letter& letter) {
  if (letter.pipe != nullptr) free_pipes_.push_back(letter.pipe);
  letter.pipe = nullptr;
  letter.offer->state.store(Offer::kFree, std::memory_order_relaxed);
  free_offers_.push_back(letter.offer);
  letter.offer = nullptr;
}

void Mailroom::sweep() {
  std::erase_if(withdrawn_, [&](Offer* offer) {
    if (offer->state.load(std::memory_order_acquire) != Offer::kGone) return false;
    free_offers_.push_back(offer);
    return true;
  });
}

// ---- both ----

// Copies chunks nobody else has claimed. The receiver ends it once all are there.
void Mailroom::copy_claimed(Letter& letter) {
  Offer& offer = *letter.offer;
  const int me = circle_.rank();
  const int sender = letter.is_send() ? me : letter.peer, receiver = letter.is_send() ? letter.op.root : me;
  const std::uint64_t n_chunks = (letter.n_bytes + kClaimChunk - 1) / kClaimChunk;
  const auto from = letter.is_send() ? own_place(letter.op.send)
                                     : find(circle_, sender, offer.send_reach, offer.send_at, letter.n_bytes);
  const auto to = letter.is_send() ? find(circle_, receiver, offer.recv_reach, offer.recv_at, letter.n_bytes)
                                   : own_place(letter.op.recv);
  if (!from || !to) {
    return end(letter, Failure{.kind = ErrorKind::kInternal,
                               .message = base::cat("rank ", letter.is_send() ? receiver : sender,
                                                    " named a buffer outside its arena"),
                               .family = ErrorFamily::kBackend});
  }
  const auto some_left = [&] { return offer.claims.next.load(std::memory_order_relaxed) < n_chunks; };
  if (some_left()) {
    const Inside inside(letter);
    const Permission permission{circle_.own().broken, &offer.given_up};
    while (some_left() && wanted(offer)) {
      const std::uint64_t index = offer.claims.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= n_chunks) break;
      const std::uint64_t at = index * kClaimChunk;
      const std::uint64_t n = std::min(kClaimChunk, letter.n_bytes - at);
      if (!letter.is_send()) copy(*to + at, *from + at, n, letter.n_bytes);
      if (letter.is_send() && !put(circle_, *to + at, (*from + at).here, n, letter.n_bytes, permission))
        return;
      ++letter.mark;
      perturb();
      if (offer.claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks && letter.is_send())
        circle_.ring(receiver);
    }
  }
  if (!letter.is_send() && offer.claims.done.load(std::memory_order_acquire) == n_chunks && wanted(offer))
    finish_receive(letter);
}

void Mailroom::end(Letter& letter, std::optional<Failure> failure) {
  letter.over = true;
  letter.failure = std::move(failure);
  ++letter.mark;
  if (!letter.is_send() && letter.op.source != nullptr) *letter.op.source = letter.peer;
}

}  // namespace lockstep::comm::internal
