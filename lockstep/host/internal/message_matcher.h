// Send and receive of one communicator. Each call is one P2pOperation; the matcher pairs them with what the
// other ranks sent, by sender and tag in the order posted, and moves the bytes.
//
// Short messages are copied into a slot of the sender's send queue: the sender is done at once. A long one is
// offered (layout.h, LongMessage has its states) and the receiver chooses the cheapest way that the two
// buffers allow: one copy by one side when one of them can be accessed (buffer_ref.h), by both sides when
// both can and it is large, otherwise through a pipe.
//
// Matching is MPI's: messages of one sender and tag are received in the order sent, by receives in the order
// posted. A message that no receive waits for is kept (UnexpectedMessage), in order, so that the slot is free
// again; receives check those first.
//
// Thread safety: everything is called by the thread that drives the communicator. Only forget() and clear()
// wait, for a peer that is inside a buffer.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/host/internal/buffer_ref.h"
#include "lockstep/host/internal/comm_members.h"

namespace lockstep::comm::internal {

// A send or a receive in progress. Exists from submit() until it is over, withdrawn or forgotten.
struct P2pOperation {
  P2pOperation(const lockstep_op& call, std::uint64_t bytes) : op(call), n_bytes(bytes), peer(call.root) {}

  const lockstep_op op;  // kind, root, tag, buffers, source
  const std::uint64_t n_bytes;
  bool over = false;
  std::optional<Failure> failure;  // with over

  // The other rank; -1 while any will do.
  int peer;
  // Grows whenever it makes progress.
  std::uint64_t mark = 0;
  // Of a long message: its record in shared memory, and how much of it this side has moved.
  LongMessage* message = nullptr;
  std::uint64_t moved = 0;
  std::uint8_t* pipe = nullptr;
  bool taken = false;  // receiver: the message is matched with this call. Sender: the receiver has taken it
  bool is_send() const { return op.kind == LOCKSTEP_SEND; }
};

inline bool is_p2p(lockstep_op_kind kind) {
  return kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV;
}
inline std::uint64_t p2p_bytes(const lockstep_op& op) {
  return op.count * size_of(op.dtype);
}

class MessageMatcher {
 public:
  explicit MessageMatcher(CommMembers& members)
      : members_(members), unexpected_(static_cast<std::size_t>(members.size())) {}

  // The operation must exist until it is over, withdraw() was true, or it was forgotten.
  void submit(P2pOperation& p2p);
  // Advances all as far as the other ranks allow.
  void advance();
  // Takes back an operation that no peer has matched; false when bytes are being moved and it must continue.
  bool withdraw(P2pOperation& p2p);
  // Drops an operation, or all, once its peer is out of the buffer. Pre: the communicator is broken or
  // closed.
  void forget(P2pOperation& p2p);
  void clear();

 private:
  // A message that no receive has asked for yet.
  struct UnexpectedMessage {
    Envelope envelope;
    LongMessage* message;  // null: the payload is here
    std::vector<std::uint8_t> payload;
  };

  // Sending.
  SendQueue* send_queue_to(int rank);
  bool post_envelope(P2pOperation& p2p);
  LongMessage* new_message(const P2pOperation& p2p);
  void advance_sends();
  void advance_send(P2pOperation& p2p);
  void open_pipe(P2pOperation& p2p);
  void fill_pipe(P2pOperation& p2p);
  void recycle(P2pOperation& p2p);
  // Receiving.
  void advance_read(P2pOperation& p2p);
  void collect(int from);
  P2pOperation* reader_of(int from, std::int32_t tag);
  bool take_unexpected(P2pOperation& p2p, int from);
  void deliver(P2pOperation& p2p, int from, const Envelope& envelope, const std::uint8_t* payload);
  bool begin(P2pOperation& p2p, int from, const Envelope& envelope, LongMessage& message);
  void advance_receive(P2pOperation& p2p);
  void drain_pipe(P2pOperation& p2p);
  void finish_receive(P2pOperation& p2p);
  // When the two calls differ in type or count, the group is broken: the sender of a short message is already
  // done and would never be notified otherwise.
  bool fits(const P2pOperation& p2p, const Envelope& envelope) const;
  void refuse(P2pOperation& p2p, int from, const Envelope& envelope);
  // Both.
  class Inside;
  // Neither side has given up, and the group is intact.
  bool wanted(const LongMessage& message);
  // Moves what is left; false when one side gave up before the end.
  bool copy_rest(P2pOperation& p2p, const BufferRef& to, const BufferRef& from);
  void copy_claimed(P2pOperation& p2p);
  void give_up(P2pOperation& p2p);
  // Returns when the other side is out of the operation's buffer, as take_back does (buffer_ref.h).
  void await_out(const P2pOperation& p2p, Deadline since);
  void end(P2pOperation& p2p, std::optional<Failure> failure = {});
  void sweep();

  CommMembers& members_;
  std::list<P2pOperation*> sends_, reads_;                 // in the order posted
  std::vector<std::deque<UnexpectedMessage>> unexpected_;  // by sender
  std::vector<LongMessage*> withdrawn_;                    // until the receiver has seen it
  std::vector<LongMessage*> free_messages_;
  std::vector<std::uint8_t*> free_pipes_;
};

// While one exists, this side may access the other's buffer. The side that gives up stores given_up and then
// loads the other's flag; this side stores its flag and then loads given_up (wanted()). All are sequentially
// consistent: one of the two sees the other.
class MessageMatcher::Inside {
 public:
  explicit Inside(const P2pOperation& p2p)
      : flag_(p2p.is_send() ? p2p.message->sender_inside : p2p.message->receiver_inside) {
    flag_.store(1, std::memory_order_seq_cst);
  }
  ~Inside() { flag_.store(0, std::memory_order_release); }
  Inside(const Inside&) = delete;

 private:
  std::atomic<std::uint32_t>& flag_;
};

}  // namespace lockstep::comm::internal
