// The receiving half of the matcher: which receive a message is for, and how its bytes are moved.
#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/failure_record.h"
#include "lockstep/host/internal/message_matcher.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {
namespace {

// Below this, copying on both sides costs more than it saves.
constexpr std::uint64_t kShareFrom = 256 << 10;

}  // namespace

// Empties the send queue of `from` to this rank: each message goes to the first receive that waits for it, or
// is kept. Envelopes are input: a count, an offset or a length that cannot be is rejected before it is used.
// acquire on the queue's offset, and on `sent`: the sender has filled the queue, and the slots, before.
void MessageMatcher::collect(int from) {
  const std::uint64_t at =
      members_.block(from).send_queues()[members_.rank()].load(std::memory_order_acquire);
  if (at == 0) return;
  auto* queue = reinterpret_cast<SendQueue*>(members_.in_arena(from, at, sizeof(SendQueue)));
  // An offset outside the arena: the queue is ignored, and a receive from that rank ends at its deadline.
  if (queue == nullptr) return;
  // relaxed: `taken` is this rank's own counter. sent - taken slots are full, and more than there are slots
  // cannot be.
  std::uint64_t taken = queue->taken.load(std::memory_order_relaxed);
  bool any = false;
  for (;;) {
    const std::uint64_t waiting = queue->sent.load(std::memory_order_acquire) - taken;
    if (waiting == 0) break;
    if (waiting > kSendSlots) {
      base::raise(ErrorKind::kInternal,
                  base::cat("rank ", from, " claims to have sent more than its send queue holds"),
                  ErrorFamily::kBackend);
    }
    // A copy: the sender's process could change the slot while it is checked and used.
    const Envelope envelope = queue->slots[taken % kSendSlots];
    const std::uint8_t* payload = queue->payload[taken % kSendSlots];
    P2pOperation* reader = reader_of(from, envelope.tag);
    if (envelope.message_at != 0) {
      auto* message =
          reinterpret_cast<LongMessage*>(members_.in_arena(from, envelope.message_at, sizeof(LongMessage)));
      if (message == nullptr) {
        // Outside the sender's arena: dropped.
      } else if (reader == nullptr) {
        unexpected_[static_cast<std::size_t>(from)].push_back({envelope, message, {}});
      } else {
        begin(*reader, from, envelope, *message);
      }
    } else if (envelope.n_bytes <= kSendSlotBytes) {
      if (reader != nullptr) {
        deliver(*reader, from, envelope, payload);
      } else {
        unexpected_[static_cast<std::size_t>(from)].push_back(
            {envelope, nullptr, {payload, payload + envelope.n_bytes}});
      }
    }
    perturb();
    // After the payload was copied: this frees the slot for the sender. seq_cst, since the sender may sleep
    // until one is free (ring() below).
    queue->taken.store(++taken, std::memory_order_seq_cst);
    any = true;
  }
  if (any) members_.ring(from);
}

// None while an earlier message of the tag is kept: the new one must queue behind it, and a receive that has
// not checked the kept ones yet finds them first.
P2pOperation* MessageMatcher::reader_of(int from, std::int32_t tag) {
  const auto& kept = unexpected_[static_cast<std::size_t>(from)];
  if (std::ranges::any_of(kept, [&](const UnexpectedMessage& one) { return one.envelope.tag == tag; }))
    return nullptr;
  for (P2pOperation* p2p : reads_) {
    if (!p2p->over && !p2p->taken && p2p->op.tag == tag && (p2p->op.root < 0 || p2p->op.root == from))
      return p2p;
  }
  return nullptr;
}

// Entries whose message was withdrawn meanwhile are dropped on the way.
bool MessageMatcher::take_unexpected(P2pOperation& p2p, int from) {
  auto& kept = unexpected_[static_cast<std::size_t>(from)];
  for (auto it = kept.begin(); it != kept.end();) {
    if (it->envelope.tag != p2p.op.tag) {
      ++it;
      continue;
    }
    const UnexpectedMessage unexpected = std::move(*it);
    it = kept.erase(it);
    if (unexpected.message == nullptr) {
      deliver(p2p, from, unexpected.envelope, unexpected.payload.data());
      return true;
    }
    if (begin(p2p, from, unexpected.envelope, *unexpected.message))
      return true;  // otherwise it was withdrawn: try the next
  }
  return false;
}

void MessageMatcher::deliver(P2pOperation& p2p, int from, const Envelope& envelope,
                             const std::uint8_t* payload) {
  p2p.peer = from;
  if (!fits(p2p, envelope)) return refuse(p2p, from, envelope);
  copy_bytes(p2p.op.recv, payload, envelope.n_bytes);
  end(p2p);
}

bool MessageMatcher::fits(const P2pOperation& p2p, const Envelope& envelope) const {
  return envelope.n_bytes == p2p.n_bytes && envelope.dtype == static_cast<std::uint32_t>(p2p.op.dtype);
}

void MessageMatcher::refuse(P2pOperation& p2p, int from, const Envelope& envelope) {
  const auto dtype =
      static_cast<lockstep_dtype>(std::min<std::uint32_t>(envelope.dtype, LOCKSTEP_DTYPES - 1));
  const auto text = [](lockstep_op_kind kind, lockstep_dtype type, std::uint64_t count) {
    return describe_call(fingerprint({.kind = kind, .dtype = type, .count = count}));
  };
  Failure failure{.kind = ErrorKind::kUsage,
                  .message = base::cat("rank ", members_.rank(), " called ",
                                       text(LOCKSTEP_RECV, p2p.op.dtype, p2p.op.count), " with tag ",
                                       p2p.op.tag, ", but rank ", from, " called ",
                                       text(LOCKSTEP_SEND, dtype, envelope.n_bytes / size_of(dtype))),
                  .family = ErrorFamily::kBackend};
  break_group(members_, failure);
  end(p2p, std::move(failure));
}

// Takes an offered message and chooses the mode. False when the sender has withdrawn it.
bool MessageMatcher::begin(P2pOperation& p2p, int from, const Envelope& envelope, LongMessage& message) {
  // fits() compares the envelope with the call; the length that is used from here on is the call's, which no
  // peer can change.
  const std::uint64_t n_bytes = p2p.n_bytes;
  if (!fits(p2p, envelope)) {
    // A withdrawn message is discarded, whatever its size. relaxed would do for this load: nothing but the
    // state is used. kGone as below.
    if (message.state.load(std::memory_order_acquire) == LongMessage::kOffered) {
      p2p.peer = from;
      refuse(p2p, from, envelope);
      return true;
    }
    message.state.store(LongMessage::kGone, std::memory_order_seq_cst);
    members_.ring(from);
    return false;
  }
  std::uint64_t recv_at = 0;
  // `publish` for this one peer: an address is enough when both ranks are threads of one process.
  const Reach recv_reach = publish(members_, p2p.op.recv, n_bytes, recv_at, from);
  // These stores are safe even when the sender withdraws meanwhile: it does not reuse the struct before
  // kGone. When a message goes the other way as well, each side copies the one that it receives.
  const bool exchange = std::ranges::any_of(sends_, [&](const P2pOperation* sent) {
    return sent->op.root == from && sent->message != nullptr && !sent->over;
  });
  const bool both = message.send_reach != Reach::kNowhere && recv_reach != Reach::kNowhere &&
                    n_bytes >= kShareFrom && !exchange;
  message.recv_reach = recv_reach;
  message.recv_at = recv_at;
  // Preferred in this order: two copiers; the receiver alone, which needs not wake the sender; the sender
  // alone.
  message.mode = both                                    ? LongMessage::kBoth
                 : message.send_reach != Reach::kNowhere ? LongMessage::kPull
                 : recv_reach != Reach::kNowhere         ? LongMessage::kPush
                                                         : LongMessage::kPipe;
  // Where it succeeds, it releases mode and the buffer to the sender; seq_cst, since the sender may sleep
  // until the message is taken (ring() below). Where it fails, kGone releases the stores above to sweep(),
  // after which the sender prepares the record anew.
  std::uint32_t offered = LongMessage::kOffered;
  perturb();
  if (!message.state.compare_exchange_strong(offered, LongMessage::kTaken)) {
    message.state.store(LongMessage::kGone, std::memory_order_seq_cst);
    members_.ring(from);
    return false;
  }
  p2p.peer = from;
  p2p.message = &message;
  p2p.taken = true;
  ++p2p.mark;
  // With kPull the sender has nothing to do before kDone.
  if (message.mode != LongMessage::kPull) members_.ring(from);
  advance_receive(p2p);
  return true;
}

// mode and the reaches were checked by this rank in begin(), but they are in the sender's memory: an
// impossible value leads to no access (find() checks the range), at worst to a receive that never ends before
// its deadline. acquire on `laid`: the sender's bytes come before it.
void MessageMatcher::advance_receive(P2pOperation& p2p) {
  LongMessage& message = *p2p.message;
  switch (message.mode) {
    case LongMessage::kPull: {
      const auto from = find(members_, p2p.peer, message.send_reach, message.send_at, p2p.n_bytes);
      if (!from) {
        return end(p2p, Failure{.kind = ErrorKind::kInternal,
                                .message = base::cat("rank ", p2p.peer, " named a buffer outside its arena"),
                                .family = ErrorFamily::kBackend});
      }
      if (copy_rest(p2p, own_buffer(p2p.op.recv), *from)) finish_receive(p2p);
      return;
    }
    case LongMessage::kPush:
      if (message.laid.load(std::memory_order_acquire) == p2p.n_bytes) finish_receive(p2p);
      return;
    case LongMessage::kBoth:
      return copy_claimed(p2p);
    case LongMessage::kPipe:
      return drain_pipe(p2p);
  }
}

// The sender publishes whole chunks, so a chunk is complete when `laid` is beyond its beginning; acquire: its
// bytes, and pipe_at, come before. `drained` releases the room that was read; seq_cst, since the sender may
// sleep until there is room.
void MessageMatcher::drain_pipe(P2pOperation& p2p) {
  LongMessage& message = *p2p.message;
  auto* to = static_cast<std::uint8_t*>(p2p.op.recv);
  while (p2p.moved < p2p.n_bytes) {
    perturb();
    const std::uint64_t laid = message.laid.load(std::memory_order_acquire);
    if (laid <= p2p.moved) return;
    const std::uint8_t* pipe = members_.in_arena(p2p.peer, message.pipe_at, kPipeChunk * kPipeChunks);
    if (pipe == nullptr) return;
    const std::uint64_t n = std::min<std::uint64_t>(kPipeChunk, p2p.n_bytes - p2p.moved);
    copy(own_buffer(to + p2p.moved), own_buffer(pipe + p2p.moved % (kPipeChunk * kPipeChunks)), n,
         p2p.n_bytes);
    p2p.moved += n;
    ++p2p.mark;
    perturb();
    message.drained.store(p2p.moved, std::memory_order_seq_cst);
    members_.ring(p2p.peer);
  }
  finish_receive(p2p);
}

// After kDone the sender may reuse the record and its buffer at once: nothing of them is read below, and as a
// release kDone comes after all that was read before. seq_cst, since the sender may sleep until then.
void MessageMatcher::finish_receive(P2pOperation& p2p) {
  perturb();
  p2p.message->state.store(LongMessage::kDone, std::memory_order_seq_cst);
  members_.ring(p2p.peer);
  end(p2p);
}

}  // namespace lockstep::comm::internal
