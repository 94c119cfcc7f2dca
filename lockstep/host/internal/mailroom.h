// Send and receive of one communicator. A letter is one call; the mailroom matches letters with what the other
// ranks sent, by sender and tag in the order posted, and moves the bytes.
//
// Short messages travel in the slots of the sender's outbox: the sender is done at once. A long one is offered
// (layout.h, Offer) and the receiver chooses the cheapest way the two buffers allow: one copy by one side when one of
// them can be reached (place.h), by both sides when both can and it is large, else through a pipe.
//
// Thread safety: everything is called by whoever drives the communicator. No call waits.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/circle.h"
#include "lockstep/host/internal/place.h"

namespace lockstep::comm::internal {

// A send or a receive under way. Lives from submit() until it is over or withdrawn.
struct Letter {
  Letter(const lockstep_op& call, std::uint64_t bytes) : op(call), n_bytes(bytes), peer(call.root) {}

  const lockstep_op op;  // kind, root, tag, buffers, source
  const std::uint64_t n_bytes;
  bool over = false;
  std::optional<Failure> failure;  // with over

  // The rank it deals with; -1 while any will do.
  int peer;
  // Counts up whenever it got further.
  std::uint64_t mark = 0;
  // A long message: its offer, and how much of it this side has moved.
  Offer* offer = nullptr;
  std::uint64_t moved = 0;
  std::uint8_t* pipe = nullptr;
  bool taken = false;  // receiver: the offer is ours. Sender: the receiver has taken it
  bool is_send() const { return op.kind == LOCKSTEP_SEND; }
};

class Mailroom {
 public:
  explicit Mailroom(Circle& circle) : circle_(circle), strangers_(static_cast<std::size_t>(circle.size())) {}

  // The letter must stay until it is over or withdraw() was true.
  void submit(Letter& letter);
  // Goes as far as the others allow.
  void advance();
  // Takes a letter back that no peer has met; false when the bytes are on their way and it must go on.
  bool withdraw(Letter& letter);
  // Forgets a letter, or every one, once its peer is out of the buffer: the communicator is broken or closed, nobody
  // will look at them again.
  void forget(Letter& letter);
  void clear();

 private:
  // A message nobody has asked for yet.
  struct Stranger {
    Envelope envelope;
    Offer* offer;  // null: the payload is here
    std::vector<std::uint8_t> payload;
  };

  // Sending.
  Outbox* outbox_to(int rank);
  bool post_envelope(Letter& letter);
  Offer* new_offer(const Letter& letter);
  void advance_sends();
  void advance_send(Letter& letter);
  void open_pipe(Letter& letter);
  void fill_pipe(Letter& letter);
  void recycle(Letter& letter);
  // Receiving.
  void advance_read(Letter& letter);
  void collect(int from);
  Letter* reader_of(int from, std::int32_t tag);
  bool take_stranger(Letter& letter, int from);
  void deliver(Letter& letter, int from, const Envelope& envelope, const std::uint8_t* payload);
  bool begin(Letter& letter, int from, const Envelope& envelope, Offer& offer);
  void advance_receive(Letter& letter);
  void drain_pipe(Letter& letter);
  void finish_receive(Letter& letter);
  // The two calls differ in type or number: breaks the group, or the sender of a short message would never know.
  bool fits(const Letter& letter, const Envelope& envelope) const;
  void refuse(Letter& letter, int from, const Envelope& envelope);
  // Both.
  class Inside;
  // Still worth touching the other side's buffer.
  bool wanted(const Offer& offer);
  // Moves what is left of a letter; false when it was given up before the end.
  bool copy_rest(Letter& letter, const Place& to, const Place& from);
  void copy_claimed(Letter& letter);
  void give_up(Letter& letter);
  // Returns when the other side is out of the letter's buffer, as take_back does (place.h).
  void await_out(const Letter& letter, Deadline since);
  void end(Letter& letter, std::optional<Failure> failure = {});
  void sweep();

  Circle& circle_;
  std::list<Letter*> sends_, reads_;             // in the order posted
  std::vector<std::deque<Stranger>> strangers_;  // by sender
  std::vector<Offer*> withdrawn_;                // until the receiver has seen it
  std::vector<Offer*> free_offers_;
  std::vector<std::uint8_t*> free_pipes_;
};

// While one lives, this side is inside the other's buffer. Whoever gives up says so and then looks whether the other is
// inside; whoever goes in does it the other way round: one of the two sees the other.
class Mailroom::Inside {
 public:
  explicit Inside(const Letter& letter)
      : flag_(letter.is_send() ? letter.offer->sender_inside : letter.offer->receiver_inside) {
    flag_.store(1, std::memory_order_seq_cst);
  }
  ~Inside() { flag_.store(0, std::memory_order_release); }
  Inside(const Inside&) = delete;

 private:
  std::atomic<std::uint32_t>& flag_;
};

}  // namespace lockstep::comm::internal
