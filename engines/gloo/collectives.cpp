#include "engines/gloo/collectives.h"

#include <algorithm>
#include <cstring>

#include "engines/gloo/reduce.h"
#include "engines/gloo/slice_reduce.h"

namespace lockstep::gloo_plugin {
namespace {

// Up to here a rank that needs a reduction's result gets all inputs whole: one step instead of two.
constexpr std::size_t kWhole = 64 << 10;

// What goes to one peer and comes from it. Every algorithm below only fills in the pieces; exchange() moves
// them. That keeps the order of messages the same for all kinds:
//
//   1  every rank -> every rank   call, and payload if small   through the mailbox; does not block
//   2  every rank                 compares all calls           a mismatch is a usage error
//   3  every rank -> every rank   large pieces                 buffer to buffer, all pairs at once
//   4  every rank                 flush()                      the next collective may use the mailbox
//
// Nothing large is sent before step 2, so no rank writes into a buffer whose owner called something else.
struct Piece {
  const char* out = nullptr;
  std::size_t out_bytes = 0;
  char* in = nullptr;  // null: small payloads stay in the mailbox
  std::size_t in_bytes = 0;
};

class Collective {
 public:
  Collective(Session& session, Operation& operation)
      : session_(session),
        operation_(operation),
        op_(operation.op),
        n_bytes_(static_cast<std::size_t>(op_.count) * size_of(op_.dtype)),
        send_(static_cast<const char*>(op_.send)),
        recv_(static_cast<char*>(op_.recv)),
        pieces_(static_cast<std::size_t>(session.size)),
        inbox_(static_cast<std::size_t>(session.size)) {}

  void run();

 private:
  Piece& piece(int rank) { return pieces_[static_cast<std::size_t>(rank)]; }
  std::size_t part_at(int rank) const { return static_cast<std::size_t>(rank) * n_bytes_; }
  bool is_root() const { return op_.root == session_.rank; }

  void exchange();
  void receive_calls();
  void check_counts();
  [[noreturn]] void refuse(int peer, const CallHeader& theirs);
  void move_large_pieces();
  void move(void* to, const void* from, std::size_t n) {
    if (n > 0 && to != from) std::memmove(to, from, n);
  }

  void broadcast();
  void reduce_small();
  void reduce_in_slices();
  void all_gather(const std::uint64_t* counts);
  void gather();
  void scatter();
  void all_to_all();
  void all_to_all_v();

  Session& session_;
  Operation& operation_;
  const lockstep_op& op_;
  const std::size_t n_bytes_;
  const char* const send_;
  char* const recv_;
  std::vector<Piece> pieces_;
  std::vector<const char*> inbox_;  // small payloads, by rank
  std::size_t small_ = kInline;     // payloads up to this many bytes travel with the call
  std::vector<std::uint64_t>
      counts_;  // ALL_TO_ALL_V: what travels with the call instead, so that all can check all
};

// The calls, the small payloads, then the large ones.
void Collective::exchange() {
  for (int peer = 0; peer < session_.size; ++peer) {
    if (peer == session_.rank) continue;
    const Piece& each = piece(peer);
    CallHeader call = operation_.call;
    call.for_you = each.out_bytes;
    if (counts_.empty()) {
      session_.mailbox.send(peer, call, each.out, each.out_bytes <= small_ ? each.out_bytes : 0);
    } else {
      session_.mailbox.send(peer, call, counts_.data(), counts_.size() * sizeof counts_[0]);
    }
  }
  receive_calls();
  move_large_pieces();
  session_.mailbox.flush();
}

void Collective::receive_calls() {
  int unlike = -1;
  CallHeader theirs;
  for (int peer = 0; peer < session_.size; ++peer) {
    if (peer == session_.rank) continue;
    operation_.waits_for = peer;
    const char* message = session_.mailbox.receive(peer, operation_.call.sequence);
    CallHeader call;
    std::memcpy(&call, message, sizeof call);
    inbox_[static_cast<std::size_t>(peer)] = message + sizeof call;
    const bool fits = !counts_.empty() || call.for_you == piece(peer).in_bytes;
    if (unlike < 0 && (!match(operation_.call, call) || !fits)) {
      unlike = peer;
      theirs = call;
    }
  }
  // Only now: by then every other rank has our call and reports the same mismatch.
  if (unlike >= 0) refuse(unlike, theirs);
  if (!counts_.empty()) check_counts();
  for (int peer = 0; peer < session_.size; ++peer) {
    const Piece& each = piece(peer);
    if (peer != session_.rank && each.in != nullptr && each.in_bytes <= small_) {
      move(each.in, inbox_[static_cast<std::size_t>(peer)], each.in_bytes);
    }
  }
}

// Whether what each rank sends to each is what that one expects. All ranks see the same and agree.
void Collective::check_counts() {
  const auto n = static_cast<std::size_t>(session_.size);
  std::vector<std::uint64_t> all(2 * n * n);
  for (std::size_t r = 0; r < n; ++r) {
    const bool own = r == static_cast<std::size_t>(session_.rank);
    std::memcpy(&all[2 * n * r], own ? static_cast<const void*>(counts_.data()) : inbox_[r],
                2 * n * sizeof all[0]);
  }
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      const std::uint64_t sent = all[2 * n * from + to], expected = all[2 * n * to + n + from];
      if (sent == expected) continue;
      session_.mailbox.flush();
      raise(LOCKSTEP_USAGE, cat(text_of(operation_.call), ": rank ", from, " sends ", sent,
                                " elements to rank ", to, ", which expects ", expected));
    }
  }
}

// flush() first: the other ranks need our call to detect the mismatch themselves.
void Collective::refuse(int peer, const CallHeader& theirs) {
  session_.mailbox.flush();
  const CallHeader& mine = operation_.call;
  std::string text = cat("ranks called different operations: rank ", session_.rank, " called ", text_of(mine),
                         ", but rank ", peer, " called ", text_of(theirs));
  if (match(mine, theirs)) {
    const std::size_t wide = size_of(op_.dtype);
    text += cat(": rank ", session_.rank, " expects ", piece(peer).in_bytes / wide, " elements from rank ",
                peer, ", which sends ", theirs.for_you / wide);
  }
  raise(LOCKSTEP_USAGE, text);
}

void Collective::move_large_pieces() {
  const std::uint64_t slot = kDataSlot | operation_.call.sequence << 8;
  std::vector<std::unique_ptr<Transfer>> ins(pieces_.size()), outs(pieces_.size());
  // A peer further on each time: not everybody sends to the same rank first.
  for (int step = 1; step < session_.size; ++step) {
    const int from = (session_.rank + session_.size - step) % session_.size;
    const Piece& each = piece(from);
    if (each.in_bytes <= small_) continue;
    auto& in = ins[static_cast<std::size_t>(from)];
    in = std::make_unique<Transfer>(session_.stop_source, session_.connections, each.in, each.in_bytes);
    in->recv(from, slot, 0, each.in_bytes);
  }
  for (int step = 1; step < session_.size; ++step) {
    const int to = (session_.rank + step) % session_.size;
    const Piece& each = piece(to);
    if (each.out_bytes <= small_) continue;
    auto& out = outs[static_cast<std::size_t>(to)];
    out = std::make_unique<Transfer>(session_.stop_source, session_.connections, each.out, each.out_bytes);
    out->send(to, slot, 0, each.out_bytes);
  }
  for (int peer = 0; peer < session_.size; ++peer) {
    operation_.waits_for = peer;
    if (const auto& in = ins[static_cast<std::size_t>(peer)]) in->wait_recv(peer);
  }
  for (int peer = 0; peer < session_.size; ++peer) {
    operation_.waits_for = peer;
    if (const auto& out = outs[static_cast<std::size_t>(peer)]) out->wait_send(peer);
  }
}

void Collective::broadcast() {
  // In slices every byte leaves the root once; below that size one round is quicker.
  constexpr std::size_t kSlicesFrom = 64 << 10;
  const bool slices = n_bytes_ > kSlicesFrom && session_.size > 2;
  for (int peer = 0; peer < session_.size && !slices; ++peer) {
    if (is_root()) piece(peer) = {.out = send_, .out_bytes = n_bytes_};
    if (!is_root() && peer == op_.root) piece(peer) = {.in = recv_, .in_bytes = n_bytes_};
  }
  exchange();
  if (is_root()) move(recv_, send_, n_bytes_);
  if (slices)
    broadcast_in_slices(session_, operation_, is_root() ? const_cast<char*>(send_) : recv_, n_bytes_);
}

// Every rank that needs the result gets all inputs and reduces them itself, in rank order, so that all get
// equal bits; no second round distributes it.
void Collective::reduce_small() {
  const bool scatter = op_.kind == LOCKSTEP_REDUCE_SCATTER;
  const bool mine = op_.kind != LOCKSTEP_REDUCE || is_root();
  for (int peer = 0; peer < session_.size; ++peer) {
    Piece& each = piece(peer);
    if (op_.kind != LOCKSTEP_REDUCE || peer == op_.root) {
      each.out = send_ + (scatter ? part_at(peer) : 0);
      each.out_bytes = n_bytes_;
    }
    if (mine) each.in_bytes = n_bytes_;
  }
  // Inputs that came with the calls are reduced where they are, in the mailbox; larger ones need room of
  // their own. The own part of it is not used.
  std::vector<char> scratch;
  if (mine && n_bytes_ > kInline) scratch.resize(pieces_.size() * n_bytes_);
  for (int peer = 0; peer < session_.size && !scratch.empty(); ++peer)
    piece(peer).in = scratch.data() + part_at(peer);
  exchange();
  if (!mine || op_.count == 0) return;
  std::vector<const void*> sources(inbox_.begin(), inbox_.end());
  for (int peer = 0; peer < session_.size && !scratch.empty(); ++peer) {
    sources[static_cast<std::size_t>(peer)] = piece(peer).in;
  }
  sources[static_cast<std::size_t>(session_.rank)] = send_ + (scatter ? part_at(session_.rank) : 0);
  reduce(op_.dtype, op_.reduce, sources, recv_, op_.count);
}

// exchange() without pieces compares the calls, as everywhere; the data follows in slice_reduce.
void Collective::reduce_in_slices() {
  exchange();
  slice_reduce(session_, operation_);
}

void Collective::all_gather(const std::uint64_t* counts) {
  const std::size_t wide = size_of(op_.dtype);
  std::vector<std::size_t> at(pieces_.size() + 1, 0);
  for (std::size_t r = 0; r < pieces_.size(); ++r) {
    at[r + 1] = at[r] + (counts != nullptr ? static_cast<std::size_t>(counts[r]) * wide : n_bytes_);
  }
  const auto mine = static_cast<std::size_t>(session_.rank);
  for (std::size_t r = 0; r < pieces_.size(); ++r) {
    pieces_[r] = {.out = send_,
                  .out_bytes = at[mine + 1] - at[mine],
                  .in = recv_ + at[r],
                  .in_bytes = at[r + 1] - at[r]};
  }
  exchange();
  move(recv_ + at[mine], send_, at[mine + 1] - at[mine]);
}

void Collective::gather() {
  for (int peer = 0; peer < session_.size; ++peer) {
    if (peer == op_.root) piece(peer) = {.out = send_, .out_bytes = n_bytes_};
    if (is_root()) piece(peer).in = recv_ + part_at(peer), piece(peer).in_bytes = n_bytes_;
  }
  exchange();
  if (is_root()) move(recv_ + part_at(session_.rank), send_, n_bytes_);
}

void Collective::scatter() {
  for (int peer = 0; peer < session_.size; ++peer) {
    if (is_root()) piece(peer) = {.out = send_ + part_at(peer), .out_bytes = n_bytes_};
    if (peer == op_.root) piece(peer).in = recv_, piece(peer).in_bytes = n_bytes_;
  }
  exchange();
  if (is_root()) move(recv_, send_ + part_at(session_.rank), n_bytes_);
}

void Collective::all_to_all() {
  for (int peer = 0; peer < session_.size; ++peer) {
    piece(peer) = {.out = send_ + part_at(peer),
                   .out_bytes = n_bytes_,
                   .in = recv_ + part_at(peer),
                   .in_bytes = n_bytes_};
  }
  exchange();
  move(recv_ + part_at(session_.rank), send_ + part_at(session_.rank), n_bytes_);
}

void Collective::all_to_all_v() {
  const std::size_t wide = size_of(op_.dtype);
  std::size_t out = 0, in = 0;
  for (std::size_t r = 0; r < pieces_.size(); ++r) {
    const std::size_t out_bytes = op_.send_counts[r] * wide, in_bytes = op_.recv_counts[r] * wide;
    pieces_[r] = {.out = send_ + out, .out_bytes = out_bytes, .in = recv_ + in, .in_bytes = in_bytes};
    out += out_bytes;
    in += in_bytes;
  }
  if (2 * pieces_.size() * sizeof counts_[0] <= kInline) {
    // The counts take the room of small payloads beside the call, so every payload, also a small one, is sent
    // in step 3.
    small_ = 0;
    // With all counts on all ranks every rank finds the same wrong pair and none starts to move data. Too
    // many ranks for an inline payload: each rank then checks its own pairs only (for_you).
    counts_ = operation_.send_counts;
    counts_.insert(counts_.end(), operation_.recv_counts.begin(), operation_.recv_counts.end());
  }
  exchange();
  const Piece& own = piece(session_.rank);
  move(own.in, own.out, own.out_bytes);
}

void Collective::run() {
  switch (op_.kind) {
    case LOCKSTEP_BROADCAST:
      return broadcast();
    case LOCKSTEP_ALL_REDUCE:
    case LOCKSTEP_REDUCE:
    case LOCKSTEP_REDUCE_SCATTER:
      // Every rank decides from its own arguments. Ranks whose arguments differ may choose differently, but
      // their calls differ too, and both ways begin with the exchange that finds this.
      return n_bytes_ * static_cast<std::size_t>(session_.size - 1) <= kWhole || n_bytes_ <= kInline
                 ? reduce_small()
                 : reduce_in_slices();
    case LOCKSTEP_ALL_GATHER:
      return all_gather(nullptr);
    case LOCKSTEP_ALL_GATHER_V:
      return all_gather(op_.recv_counts);
    case LOCKSTEP_GATHER:
      return gather();
    case LOCKSTEP_SCATTER:
      return scatter();
    case LOCKSTEP_ALL_TO_ALL:
      return all_to_all();
    case LOCKSTEP_ALL_TO_ALL_V:
      return all_to_all_v();
    default:
      return exchange();  // a barrier
  }
}

}  // namespace

void run_collective(Session& session, Operation& operation) {
  Collective(session, operation).run();
}

}  // namespace lockstep::gloo_plugin
