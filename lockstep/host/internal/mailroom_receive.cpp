// The receiver's part of the mailroom: which letter a message is for, and how its bytes travel.
#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/ledger.h"
#include "lockstep/host/internal/mailroom.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {
namespace {

// Below this a second pair of hands costs more than it gives.
constexpr std::uint64_t kShareFrom = 256 << 10;

}  // namespace

// Empties the outbox of `from` for this rank: each message goes to the first letter that waits for it, or is kept.
void Mailroom::collect(int from) {
  const std::uint64_t at = circle_.board(from).outboxes()[circle_.rank()].load(std::memory_order_acquire);
  if (at == 0) return;
  auto* box = reinterpret_cast<Outbox*>(circle_.in_arena(from, at, sizeof(Outbox)));
  if (box == nullptr) return;
  std::uint64_t taken = box->taken.load(std::memory_order_relaxed);
  bool any = false;
  for (;;) {
    const std::uint64_t waiting = box->sent.load(std::memory_order_acquire) - taken;
    if (waiting == 0) break;
    if (waiting > kMailSlots) {
      base::raise(ErrorKind::kInternal, base::cat("rank ", from, " says it sent more than its outbox holds"),
                  ErrorFamily::kBackend);
    }
    const Envelope envelope = box->slots[taken % kMailSlots];
    const std::uint8_t* payload = box->payload[taken % kMailSlots];
    Letter* reader = reader_of(from, envelope.tag);
    if (envelope.offer_at != 0) {
      auto* offer = reinterpret_cast<Offer*>(circle_.in_arena(from, envelope.offer_at, sizeof(Offer)));
      if (offer == nullptr) {
        // Not ours to trust: drop it.
      } else if (reader == nullptr) {
        strangers_[static_cast<std::size_t>(from)].push_back({envelope, offer, {}});
      } else {
        begin(*reader, from, envelope, *offer);
      }
    } else if (envelope.n_bytes <= kMailBytes) {
      if (reader != nullptr) {
        deliver(*reader, from, envelope, payload);
      } else {
        strangers_[static_cast<std::size_t>(from)].push_back(
            {envelope, nullptr, {payload, payload + envelope.n_bytes}});
      }
    }
    perturb();
    box->taken.store(++taken, std::memory_order_seq_cst);
    any = true;
  }
  if (any) circle_.ring(from);
}

// Nobody while earlier messages of the tag wait to be asked for: a letter that has not looked at them yet must find them
// first.
Letter* Mailroom::reader_of(int from, std::int32_t tag) {
  const auto& kept = strangers_[static_cast<std::size_t>(from)];
  if (std::ranges::any_of(kept, [&](const Stranger& one) { return one.envelope.tag == tag; })) return nullptr;
  for (Letter* letter : reads_) {
    if (!letter->over && !letter->taken && letter->op.tag == tag &&
        (letter->op.root < 0 || letter->op.root == from))
      return letter;
  }
  return nullptr;
}

bool Mailroom::take_stranger(Letter& letter, int from) {
  auto& kept = strangers_[static_cast<std::size_t>(from)];
  for (auto it = kept.begin(); it != kept.end();) {
    if (it->envelope.tag != letter.op.tag) {
      ++it;
      continue;
    }
    const Stranger stranger = std::move(*it);
    it = kept.erase(it);
    if (stranger.offer == nullptr) {
      deliver(letter, from, stranger.envelope, stranger.payload.data());
      return true;
    }
    if (begin(letter, from, stranger.envelope, *stranger.offer))
      return true;  // else it was withdrawn: look on
  }
  return false;
}

void Mailroom::deliver(Letter& letter, int from, const Envelope& envelope, const std::uint8_t* payload) {
  letter.peer = from;
  if (!fits(letter, envelope)) return refuse(letter, from, envelope);
  copy_bytes(letter.op.recv, payload, envelope.n_bytes);
  end(letter);
}

bool Mailroom::fits(const Letter& letter, const Envelope& envelope) const {
  return envelope.n_bytes == letter.n_bytes && envelope.dtype == static_cast<std::uint32_t>(letter.op.dtype);
}

void Mailroom::refuse(Letter& letter, int from, const Envelope& envelope) {
  const auto dtype =
      static_cast<lockstep_dtype>(std::min<std::uint32_t>(envelope.dtype, LOCKSTEP_DTYPES - 1));
  const auto words = [](lockstep_op_kind kind, lockstep_dtype type, std::uint64_t count) {
    return describe_call(fingerprint({.kind = kind, .dtype = type, .count = count}));
  };
  Failure failure{.kind = ErrorKind::kUsage,
                  .message = base::cat("rank ", circle_.rank(), " called ",
                                       words(LOCKSTEP_RECV, letter.op.dtype, letter.op.count), " with tag ",
                                       letter.op.tag, ", but rank ", from, " called ",
                                       words(LOCKSTEP_SEND, dtype, envelope.n_bytes / size_of(dtype))),
                  .family = ErrorFamily::kBackend};
  break_group(circle_, failure);
  end(letter, std::move(failure));
}

// False when the sender has taken the message back.
bool Mailroom::begin(Letter& letter, int from, const Envelope& envelope, Offer& offer) {
  const std::uint64_t n_bytes = letter.n_bytes;
  if (!fits(letter, envelope)) {
    // One that was taken back fits nobody, and need not.
    if (offer.state.load(std::memory_order_acquire) == Offer::kOffered) {
      letter.peer = from;
      refuse(letter, from, envelope);
      return true;
    }
    offer.state.store(Offer::kGone, std::memory_order_seq_cst);
    circle_.ring(from);
    return false;
  }
  std::uint64_t recv_at = 0;
  const Reach recv_reach = publish(circle_, letter.op.recv, n_bytes, recv_at, from);
  // Until the state says kGone the sender keeps the offer as it is, so writing into a withdrawn one harms nobody.
  // When a message goes the other way as well, each side has one of its own to fetch.
  const bool exchange = std::ranges::any_of(sends_, [&](const Letter* sent) {
    return sent->op.root == from && sent->offer != nullptr && !sent->over;
  });
  const bool both = offer.send_reach != Reach::kNowhere && recv_reach != Reach::kNowhere &&
                    n_bytes >= kShareFrom && !exchange;
  offer.recv_reach = recv_reach;
  offer.recv_at = recv_at;
  offer.mode = both                                  ? Offer::kBoth
               : offer.send_reach != Reach::kNowhere ? Offer::kPull
               : recv_reach != Reach::kNowhere       ? Offer::kPush
                                                     : Offer::kPipe;
  std::uint32_t offered = Offer::kOffered;
  perturb();
  if (!offer.state.compare_exchange_strong(offered, Offer::kTaken)) {
    offer.state.store(Offer::kGone, std::memory_order_seq_cst);
    circle_.ring(from);
    return false;
  }
  letter.peer = from;
  letter.offer = &offer;
  letter.taken = true;
  ++letter.mark;
  if (offer.mode != Offer::kPull) circle_.ring(from);
  advance_receive(letter);
  return true;
}

void Mailroom::advance_receive(Letter& letter) {
  Offer& offer = *letter.offer;
  switch (offer.mode) {
    case Offer::kPull: {
      const auto from = find(circle_, letter.peer, offer.send_reach, offer.send_at, letter.n_bytes);
      if (!from) {
        return end(letter,
                   Failure{.kind = ErrorKind::kInternal,
                           .message = base::cat("rank ", letter.peer, " named a buffer outside its arena"),
                           .family = ErrorFamily::kBackend});
      }
      if (copy_rest(letter, own_place(letter.op.recv), *from)) finish_receive(letter);
      return;
    }
    case Offer::kPush:
      if (offer.laid.load(std::memory_order_acquire) == letter.n_bytes) finish_receive(letter);
      return;
    case Offer::kBoth:
      return copy_claimed(letter);
    case Offer::kPipe:
      return drain_pipe(letter);
  }
}

void Mailroom::drain_pipe(Letter& letter) {
  Offer& offer = *letter.offer;
  auto* to = static_cast<std::uint8_t*>(letter.op.recv);
  while (letter.moved < letter.n_bytes) {
    perturb();
    const std::uint64_t laid = offer.laid.load(std::memory_order_acquire);
    if (laid <= letter.moved) return;
    const std::uint8_t* pipe = circle_.in_arena(letter.peer, offer.pipe_at, kPipeChunk * kPipeChunks);
    if (pipe == nullptr) return;
    const std::uint64_t n = std::min<std::uint64_t>(kPipeChunk, letter.n_bytes - letter.moved);
    copy(own_place(to + letter.moved), own_place(pipe + letter.moved % (kPipeChunk * kPipeChunks)), n,
         letter.n_bytes);
    letter.moved += n;
    ++letter.mark;
    perturb();
    offer.drained.store(letter.moved, std::memory_order_seq_cst);
    circle_.ring(letter.peer);
  }
  finish_receive(letter);
}

void Mailroom::finish_receive(Letter& letter) {
  perturb();
  letter.offer->state.store(Offer::kDone, std::memory_order_seq_cst);
  circle_.ring(letter.peer);
  end(letter);
}

}  // namespace lockstep::comm::internal
