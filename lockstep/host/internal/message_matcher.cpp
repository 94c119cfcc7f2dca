#include "lockstep/host/internal/message_matcher.h"

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

// The states of a P2pOperation, and what its members say in each. An operation that is over is dropped by the
// next advance().
//
//   send                              members         what may happen
//   queued                            message null    no slot is free, or an earlier send to that rank waits
//     |'-- short: copied into a slot --------------------------------------------------------> over
//     | long: offered, envelope posted
//   offered                           message set     withdraw() may still win: kOffered -> kWithdrawn
//     | receiver: kOffered -> kTaken
//   taken                             taken           not to be withdrawn; unless kPull, this side copies
//     '--- receiver: kTaken -> kDone, then recycle() -----------------------------------------> over
//
//   receive
//   waiting                           message null    withdraw() always succeeds
//     |'-- short: copied from the slot, or from unexpected_ ----------------------------------> over
//     | long: begin() wins kOffered -> kTaken
//   taken                             message, taken  not to be withdrawn
//     '--- all bytes are here: finish_receive() stores kDone ---------------------------------> over
//
//   either, in any state: the two calls do not fit, or a buffer is outside its arena --> over, failed
//
// A message as its receiver sees it:
//
//   in the send queue --collect()--> handed to a receive that waits
//                            '-----> unexpected_ --take_unexpected()--> handed over, or withdrawn: dropped
//
// Messages of one sender and tag never overtake each other: collect() empties a queue in order, reader_of()
// does not pass a kept message, and take_unexpected() begins with the oldest.

// Between two checks whether the other side has given up; in kBoth also the unit of claiming. A rank that
// gives up waits for at most one such chunk of a peer that runs.
constexpr std::uint64_t kClaimChunk = 128 << 10;

}  // namespace

void MessageMatcher::submit(P2pOperation& p2p) {
  (p2p.is_send() ? sends_ : reads_).push_back(&p2p);
}

void MessageMatcher::advance() {
  const auto drop_over = [&] { reads_.remove_if([](const P2pOperation* p2p) { return p2p->over; }); };
  try {
    advance_sends();
    for (P2pOperation* p2p : reads_) advance_read(*p2p);
  } catch (...) {
    drop_over();  // their owners destroy them
    throw;
  }
  drop_over();
  if (!withdrawn_.empty()) sweep();
}

// Envelopes to one rank enter its send queue in the order posted: a send that finds no slot holds back the
// later ones to that rank, and only those.
void MessageMatcher::advance_sends() {
  std::bitset<kMaxRanks> full;
  for (auto it = sends_.begin(); it != sends_.end();) {
    P2pOperation& p2p = **it;
    const auto to = static_cast<std::size_t>(p2p.op.root);
    // A message exists from the moment its envelope is posted: its place in the order is fixed then.
    if (p2p.message != nullptr) {
      advance_send(p2p);
    } else if (full[to] || !post_envelope(p2p)) {
      full[to] = true;
    }
    it = p2p.over ? sends_.erase(it) : std::next(it);
  }
}

// Kept messages are checked first: they were sent before anything that is still in the queue.
void MessageMatcher::advance_read(P2pOperation& p2p) {
  if (p2p.taken && !p2p.over) return advance_receive(p2p);
  for (int r = 0; r < members_.size() && !p2p.over && !p2p.taken; ++r) {
    if (p2p.op.root >= 0 && p2p.op.root != r) continue;
    if (!take_unexpected(p2p, r)) collect(r);
  }
}

// A send whose envelope is not posted yet, and a receive that has no message yet, belong to this rank alone.
// For an offered message the compare-exchange decides against the receiver's (begin()); only their order on
// that one word matters, so any memory order would do.
bool MessageMatcher::withdraw(P2pOperation& p2p) {
  if (p2p.is_send() && p2p.message != nullptr) {
    std::uint32_t offered = LongMessage::kOffered;
    if (!p2p.message->state.compare_exchange_strong(offered, LongMessage::kWithdrawn)) return false;
    withdrawn_.push_back(p2p.message);
  } else if (p2p.taken) {
    return false;
  }
  sends_.remove(&p2p);
  reads_.remove(&p2p);
  return true;
}

void MessageMatcher::forget(P2pOperation& p2p) {
  sends_.remove(&p2p);
  reads_.remove(&p2p);
  give_up(p2p);
  await_out(p2p, Deadline::now());
}

// First all are given up, then all are waited for: the peers get out of the buffers at the same time.
void MessageMatcher::clear() {
  for (const auto* operations : {&sends_, &reads_}) {
    for (P2pOperation* p2p : *operations) give_up(*p2p);
  }
  const Deadline since = Deadline::now();
  for (const auto* operations : {&sends_, &reads_}) {
    for (P2pOperation* p2p : *operations) await_out(*p2p, since);
  }
  sends_.clear();
  reads_.clear();
}

// Never waits. A message that the receiver has not taken is withdrawn, and can no longer be taken; one that
// it has taken is marked, and the other side stops at its next chunk. seq_cst on given_up: await_out() loads
// the other side's flag next, which that side stores before it loads given_up (Inside).
void MessageMatcher::give_up(P2pOperation& p2p) {
  if (p2p.message == nullptr) return;
  std::uint32_t offered = LongMessage::kOffered;
  if (p2p.is_send() && p2p.message->state.compare_exchange_strong(offered, LongMessage::kWithdrawn)) return;
  p2p.message->given_up.store(1, std::memory_order_seq_cst);
}

// seq_cst: after the store of given_up, see there. Where it loads 0 that was stored by ~Inside, a release,
// the other side's accesses to the buffer are over.
void MessageMatcher::await_out(const P2pOperation& p2p, Deadline since) {
  if (p2p.message == nullptr) return;
  const auto& other = p2p.is_send() ? p2p.message->receiver_inside : p2p.message->sender_inside;
  const auto inside = [&] { return other.load(std::memory_order_seq_cst) != 0; };
  take_back(members_, p2p.peer, p2p.op.recv, p2p.is_send() ? 0 : p2p.n_bytes, inside, since);
}

// given_up is seq_cst against Inside. broken is a hint: it only bounds how much is copied for nothing; who
// breaks the group gives up its messages as well (clear()).
bool MessageMatcher::wanted(const LongMessage& message) {
  return message.given_up.load(std::memory_order_seq_cst) == 0 &&
         members_.own().broken.load(std::memory_order_relaxed) == 0;
}

// The permission is checked again after Inside was published, and before every chunk: an owner that has given
// up either sees the flag and waits, or this side sees given_up and does not touch the buffer.
bool MessageMatcher::copy_rest(P2pOperation& p2p, const BufferRef& to, const BufferRef& from) {
  const Inside inside(p2p);
  while (wanted(*p2p.message)) {
    const std::uint64_t n = std::min(kClaimChunk, p2p.n_bytes - p2p.moved);
    if (n == 0) return true;
    perturb();
    copy(to + p2p.moved, from + p2p.moved, n, p2p.n_bytes);
    p2p.moved += n;
    ++p2p.mark;
  }
  return false;
}

// ---- sending ----

// Created when first needed: most pairs of ranks never exchange a message, and a queue takes nine pages.
// relaxed: this rank alone stores the offset. seq_cst: the receiver may be about to sleep, and finds the queue
// in its last look; as a release it publishes the queue's zeros.
SendQueue* MessageMatcher::send_queue_to(int rank) {
  auto& where = members_.own().send_queues()[rank];
  std::uint64_t at = where.load(std::memory_order_relaxed);
  if (at == 0) {
    void* memory = members_.arena().allocate(sizeof(SendQueue));
    members_.keep_until_released(memory);
    new (memory) SendQueue();
    at = members_.arena().offset_of(memory);
    where.store(at, std::memory_order_seq_cst);
  }
  return reinterpret_cast<SendQueue*>(members_.arena().base() + at);
}

// False when there is no free slot. relaxed: `sent` is this rank's own counter. acquire: the receiver has
// copied the slot's old content before it advanced `taken`.
bool MessageMatcher::post_envelope(P2pOperation& p2p) {
  SendQueue& queue = *send_queue_to(p2p.op.root);
  const std::uint64_t sent = queue.sent.load(std::memory_order_relaxed);
  // Counters are compared by their difference; neither is ever reduced modulo the number of slots.
  if (sent - queue.taken.load(std::memory_order_acquire) >= kSendSlots) return false;
  Envelope& envelope = queue.slots[sent % kSendSlots];
  envelope.n_bytes = p2p.n_bytes;
  envelope.tag = p2p.op.tag;
  envelope.dtype = p2p.op.dtype;
  envelope.message_at = 0;
  const bool brief = p2p.n_bytes <= kSendSlotBytes;
  if (brief) {
    copy_bytes(queue.payload[sent % kSendSlots], p2p.op.send, p2p.n_bytes);
  } else {
    p2p.message = new_message(p2p);
    envelope.message_at = members_.arena().offset_of(p2p.message);
  }
  perturb();
  // Releases slot, payload and LongMessage; seq_cst, since ring() reads next whether the receiver sleeps.
  queue.sent.store(sent + 1, std::memory_order_seq_cst);
  members_.ring(p2p.op.root);
  ++p2p.mark;
  if (brief) end(p2p);
  return true;
}

// Records live as long as the communicator: the receiver may keep the offset of a withdrawn one (unexpected_)
// for any time.
LongMessage* MessageMatcher::new_message(const P2pOperation& p2p) {
  LongMessage* message = nullptr;
  if (free_messages_.empty()) {
    void* memory = members_.arena().allocate(sizeof(LongMessage));
    members_.keep_until_released(memory);
    message = new (memory) LongMessage();
  } else {
    message = free_messages_.back();
    free_messages_.pop_back();
  }
  message->send_reach = publish(members_, p2p.op.send, p2p.n_bytes, message->send_at, p2p.op.root);
  message->n_bytes = p2p.n_bytes;
  message->pipe_at = 0;
  // relaxed: see the store of `state` below. sender_inside and receiver_inside are 0 already: the receiver
  // clears its own before it stores kDone, the sender before it recycles the record.
  message->laid.store(0, std::memory_order_relaxed);
  message->drained.store(0, std::memory_order_relaxed);
  message->claims.next.store(0, std::memory_order_relaxed);
  message->claims.done.store(0, std::memory_order_relaxed);
  message->given_up.store(0, std::memory_order_relaxed);
  // relaxed would do here as well: nobody else has the offset, or has it still (kDone and kGone come after the
  // receiver's last access), and the store of SendQueue::sent publishes all of the record.
  message->state.store(LongMessage::kOffered, std::memory_order_release);
  return message;
}

void MessageMatcher::advance_send(P2pOperation& p2p) {
  LongMessage& message = *p2p.message;
  perturb();
  const std::uint32_t state = message.state.load(std::memory_order_acquire);
  if (state == LongMessage::kOffered) return;
  // Every state but kOffered means that the receiver has decided: `mode`, recv_reach and recv_at are
  // readable, released by its compare-exchange. After kDone its copies from this rank's buffer are over, so
  // the caller may write there.
  if (!p2p.taken) p2p.taken = true, ++p2p.mark;
  if (state == LongMessage::kTaken) {
    // kPull needs nothing of this side.
    if (message.mode == LongMessage::kBoth) copy_claimed(p2p);
    if (message.mode == LongMessage::kPipe) fill_pipe(p2p);
    if (message.mode == LongMessage::kPush && p2p.moved < p2p.n_bytes) {
      const auto to = find(members_, p2p.op.root, message.recv_reach, message.recv_at, p2p.n_bytes);
      // kPush is chosen only when this rank's buffer cannot be read, so the kernel does not copy either: the
      // receiver's is in its arena.
      if (!to || to->here == nullptr) {
        return end(p2p,
                   Failure{.kind = ErrorKind::kInternal,
                           .message = base::cat("rank ", p2p.op.root, " named a buffer outside its arena"),
                           .family = ErrorFamily::kBackend});
      }
      if (!copy_rest(p2p, *to, own_buffer(p2p.op.send))) return;
      // Releases the bytes; seq_cst, since ring() reads next whether the receiver sleeps.
      message.laid.store(p2p.n_bytes, std::memory_order_seq_cst);
      members_.ring(p2p.op.root);
    }
    return;
  }
  recycle(p2p);
  end(p2p);
}

// pipe_at is plain: the receiver reads it after it has acquired `laid`, which is stored later.
void MessageMatcher::open_pipe(P2pOperation& p2p) {
  if (p2p.pipe != nullptr) return;
  if (free_pipes_.empty()) {
    void* memory = members_.arena().allocate(kPipeChunk * kPipeChunks);
    members_.keep_until_released(memory);
    free_pipes_.push_back(static_cast<std::uint8_t*>(memory));
  }
  p2p.pipe = free_pipes_.back();
  free_pipes_.pop_back();
  p2p.message->pipe_at = members_.arena().offset_of(p2p.pipe);
}

// A ring of kPipeChunks chunks. `moved` is a multiple of the chunk until the last one, so a chunk never wraps
// around; the sender goes on while at least one whole chunk is free. laid releases the bytes, drained
// releases the room: acquired here, so that a chunk is not overwritten while the receiver reads it. laid is
// seq_cst, since ring() reads next whether the receiver sleeps.
void MessageMatcher::fill_pipe(P2pOperation& p2p) {
  LongMessage& message = *p2p.message;
  open_pipe(p2p);
  const auto* from = static_cast<const std::uint8_t*>(p2p.op.send);
  while (p2p.moved < p2p.n_bytes) {
    const std::uint64_t drained = message.drained.load(std::memory_order_acquire);
    if (p2p.moved - drained > kPipeChunk * (kPipeChunks - 1)) return;
    const std::uint64_t n = std::min<std::uint64_t>(kPipeChunk, p2p.n_bytes - p2p.moved);
    copy_bytes(p2p.pipe + p2p.moved % (kPipeChunk * kPipeChunks), from + p2p.moved, n);
    p2p.moved += n;
    ++p2p.mark;
    perturb();
    message.laid.store(p2p.moved, std::memory_order_seq_cst);
    members_.ring(p2p.op.root);
  }
}

// Pre: kDone. The receiver does not access the message any more.
void MessageMatcher::recycle(P2pOperation& p2p) {
  if (p2p.pipe != nullptr) free_pipes_.push_back(p2p.pipe);
  p2p.pipe = nullptr;
  // relaxed: the record belongs to this rank again; new_message() prepares it before it is offered again.
  p2p.message->state.store(LongMessage::kFree, std::memory_order_relaxed);
  free_messages_.push_back(p2p.message);
  p2p.message = nullptr;
}

// acquire: the receiver's last stores into the record (begin()) come before its kGone.
void MessageMatcher::sweep() {
  std::erase_if(withdrawn_, [&](LongMessage* message) {
    if (message->state.load(std::memory_order_acquire) != LongMessage::kGone) return false;
    free_messages_.push_back(message);
    return true;
  });
}

// ---- both ----

// kBoth: both sides copy chunks that neither has claimed. The receiver ends it once all are there. Orders as
// for Claims (layout.h): `next` is relaxed and distributes indices only, `done` releases the bytes of each
// chunk to the receiver, which acquires the final count. The additions to `done` are seq_cst, since ring()
// reads next whether the receiver sleeps.
void MessageMatcher::copy_claimed(P2pOperation& p2p) {
  LongMessage& message = *p2p.message;
  const int me = members_.rank();
  const int sender = p2p.is_send() ? me : p2p.peer, receiver = p2p.is_send() ? p2p.op.root : me;
  const std::uint64_t n_chunks = (p2p.n_bytes + kClaimChunk - 1) / kClaimChunk;
  const auto from = p2p.is_send() ? own_buffer(p2p.op.send)
                                  : find(members_, sender, message.send_reach, message.send_at, p2p.n_bytes);
  const auto to = p2p.is_send() ? find(members_, receiver, message.recv_reach, message.recv_at, p2p.n_bytes)
                                : own_buffer(p2p.op.recv);
  if (!from || !to) {
    return end(p2p, Failure{.kind = ErrorKind::kInternal,
                            .message = base::cat("rank ", p2p.is_send() ? receiver : sender,
                                                 " named a buffer outside its arena"),
                            .family = ErrorFamily::kBackend});
  }
  // A claimed chunk is finished by whoever claimed it, so some_left() may be false long before `done` is
  // complete.
  const auto some_left = [&] { return message.claims.next.load(std::memory_order_relaxed) < n_chunks; };
  if (some_left()) {
    const Inside inside(p2p);
    const Permission permission{members_.own().broken, &message.given_up};
    // Each turn: a chunk is claimed, copied, and only then counted in `done`. A side that leaves between the
    // two (put() was revoked) leaves `done` short for ever, so a message is never reported complete without
    // all of its bytes.
    while (some_left() && wanted(message)) {
      const std::uint64_t index = message.claims.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= n_chunks) break;
      const std::uint64_t at = index * kClaimChunk;
      const std::uint64_t n = std::min(kClaimChunk, p2p.n_bytes - at);
      if (!p2p.is_send()) copy(*to + at, *from + at, n, p2p.n_bytes);
      if (p2p.is_send() && !put(members_, *to + at, (*from + at).here, n, p2p.n_bytes, permission)) return;
      ++p2p.mark;
      perturb();
      // The sender wakes the receiver with the last chunk only: the receiver copies too and looks at `done`
      // after its own.
      if (message.claims.done.fetch_add(1, std::memory_order_seq_cst) + 1 == n_chunks && p2p.is_send())
        members_.ring(receiver);
    }
  }
  if (!p2p.is_send() && message.claims.done.load(std::memory_order_acquire) == n_chunks && wanted(message))
    finish_receive(p2p);
}

// `source` is where a receive from any rank reports the sender; it belongs to the caller and is valid until
// the operation is over.
void MessageMatcher::end(P2pOperation& p2p, std::optional<Failure> failure) {
  p2p.over = true;
  p2p.failure = std::move(failure);
  ++p2p.mark;
  if (!p2p.is_send() && p2p.op.source != nullptr) *p2p.op.source = p2p.peer;
}

}  // namespace lockstep::comm::internal
