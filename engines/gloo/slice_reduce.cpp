#include "engines/gloo/slice_reduce.h"

#include <algorithm>

#include "engines/gloo/reduce.h"

namespace lockstep::gloo_plugin {
namespace {

// Chunks of a slice that may be under way at once.
constexpr std::size_t kWindow = 4;

// Some part of the vector, in bytes.
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
};

std::size_t chunks_in(const Range& range, std::size_t chunk) {
  return (range.size() + chunk - 1) / chunk;
}
Range chunk_of(const Range& range, std::size_t chunk, std::size_t c) {
  return {range.begin + c * chunk, std::min(range.end, range.begin + (c + 1) * chunk)};
}

// Large enough that a message's fixed cost vanishes, small enough that all that is under way fits a cache.
std::size_t chunk_bytes(int size) {
  constexpr std::size_t kUnderWay = 4 << 20, kLeast = 64 << 10, kMost = 512 << 10;
  const std::size_t n_bytes =
      std::clamp(kUnderWay / (kWindow * static_cast<std::size_t>(size)), kLeast, kMost);
  return n_bytes / 64 * 64;  // whole elements
}

// A pipeline per rank, over the chunks of its own slice:
//
//   others' chunk c --> scratch[c % kWindow] --reduce, rank order--> recv (or result_) --> to every rank that gets the result
//
// kWindow chunks are in flight, so receiving, arithmetic and sending overlap. All of the own input is sent at
// once: gloo queues what the receivers have not requested yet, and they request in order of chunks.
class SliceReduce {
 public:
  SliceReduce(Session& session, Operation& operation);
  void run();

 private:
  std::size_t at(std::size_t window, int peer) const {
    return window * static_cast<std::size_t>(size_) + static_cast<std::size_t>(peer);
  }
  // Where rank `owner`'s slice is in what is sent.
  Range slice(int owner) const;
  bool gets_result(int rank) const {
    return op_.kind == LOCKSTEP_ALL_REDUCE || (op_.kind == LOCKSTEP_REDUCE && rank == op_.root);
  }
  void send_inputs();
  void expect_results();
  void expect_inputs(std::size_t chunk);
  void reduce_chunk(std::size_t chunk);
  void finish();
  template <class F>
  void for_peers(F&& f) {
    for (int step = 1; step < size_; ++step) f((rank_ + step) % size_);
  }
  std::unique_ptr<Transfer> transfer(const void* memory, std::size_t n) {
    return std::make_unique<Transfer>(session_.stop_source, session_.connections, memory, n);
  }

  Session& session_;
  Operation& operation_;
  const lockstep_op& op_;
  const int rank_, size_;
  const std::size_t wide_, chunk_;
  const std::uint64_t input_slot_, result_slot_;
  Range mine_;
  // Inputs of the others for a window of chunks of our slice, and where a result waits to be sent.
  std::vector<char> scratch_, result_;
  std::vector<std::unique_ptr<Transfer>> inputs_;                   // [window][peer]
  std::vector<std::unique_ptr<Transfer>> outs_, results_, handed_;  // [peer]
  std::vector<std::size_t> n_results_;                              // chunks handed to each peer
};

SliceReduce::SliceReduce(Session& session, Operation& operation)
    : session_(session),
      operation_(operation),
      op_(operation.op),
      rank_(session.rank),
      size_(session.size),
      wide_(size_of(op_.dtype)),
      chunk_(chunk_bytes(size_)),
      input_slot_(kDataSlot | operation.call.sequence << 8 | 1),
      result_slot_(input_slot_ + 1),
      mine_(slice(rank_)) {
  const std::size_t windows = std::min(kWindow, chunks_in(mine_, chunk_));
  scratch_.resize(windows * static_cast<std::size_t>(size_) * chunk_);
  // A result that stays nowhere at this rank: all of them, since the receiver may be slow.
  if (op_.kind == LOCKSTEP_REDUCE && rank_ != op_.root) result_.resize(mine_.size());
  inputs_.resize(windows * static_cast<std::size_t>(size_));
  outs_.resize(static_cast<std::size_t>(size_));
  results_.resize(outs_.size());
  handed_.resize(outs_.size());
  n_results_.resize(outs_.size());
}

Range SliceReduce::slice(int owner) const {
  const auto o = static_cast<std::size_t>(owner), n = static_cast<std::size_t>(size_);
  const std::size_t count = op_.count;
  if (op_.kind == LOCKSTEP_REDUCE_SCATTER) return {o * count * wide_, (o + 1) * count * wide_};
  const std::size_t each = count / n, more = count % n;
  const std::size_t begin = o * each + std::min(o, more);
  return {begin * wide_, (begin + each + (o < more ? 1 : 0)) * wide_};
}

void SliceReduce::send_inputs() {
  for_peers([&](int peer) {
    const Range range = slice(peer);
    auto& out = outs_[static_cast<std::size_t>(peer)];
    out = transfer(static_cast<const char*>(op_.send) + range.begin, range.size());
    for (std::size_t c = 0; c < chunks_in(range, chunk_); ++c) {
      const Range part = chunk_of(range, chunk_, c);
      out->send(peer, input_slot_, part.begin - range.begin, part.size());
    }
  });
}

// In place, a result overwrites an input of ours: it cannot come before its owner has had that input.
void SliceReduce::expect_results() {
  if (!gets_result(rank_)) return;
  for_peers([&](int peer) {
    const Range range = slice(peer);
    auto& in = results_[static_cast<std::size_t>(peer)];
    in = transfer(static_cast<char*>(op_.recv) + range.begin, range.size());
    for (std::size_t c = 0; c < chunks_in(range, chunk_); ++c) {
      const Range part = chunk_of(range, chunk_, c);
      in->recv(peer, result_slot_, part.begin - range.begin, part.size());
    }
  });
}

void SliceReduce::expect_inputs(std::size_t chunk) {
  if (chunk >= chunks_in(mine_, chunk_)) return;
  for_peers([&](int peer) {
    const std::size_t index = at(chunk % kWindow, peer);
    if (!inputs_[index]) inputs_[index] = transfer(scratch_.data() + index * chunk_, chunk_);
    inputs_[index]->recv(peer, input_slot_, 0, chunk_of(mine_, chunk_, chunk).size());
  });
}

void SliceReduce::reduce_chunk(std::size_t chunk) {
  const Range part = chunk_of(mine_, chunk_, chunk);
  std::vector<const void*> sources(static_cast<std::size_t>(size_));
  sources[static_cast<std::size_t>(rank_)] = static_cast<const char*>(op_.send) + part.begin;
  for_peers([&](int peer) {
    const std::size_t index = at(chunk % kWindow, peer);
    operation_.waits_for = peer;
    inputs_[index]->wait_recv(peer);
    sources[static_cast<std::size_t>(peer)] = scratch_.data() + index * chunk_;
  });
  const std::size_t begin = part.begin - mine_.begin;
  char* target = result_.data() + begin;
  if (result_.empty()) {
    target = static_cast<char*>(op_.recv) + (op_.kind == LOCKSTEP_REDUCE_SCATTER ? begin : part.begin);
  }
  reduce(op_.dtype, op_.reduce, sources, target, part.size() / wide_);
  // After the reduction has read the scratch of `chunk`, which this receive reuses.
  expect_inputs(chunk + kWindow);
  for_peers([&](int peer) {
    if (!gets_result(peer)) return;
    auto& out = handed_[static_cast<std::size_t>(peer)];
    if (!out) out = transfer(target - begin, mine_.size());
    out->send(peer, result_slot_, begin, part.size());
    ++n_results_[static_cast<std::size_t>(peer)];
  });
}

// One wait per message that was started. Sends too: only then are the buffers the caller's again.
void SliceReduce::finish() {
  const auto wait = [&](auto& transfers, auto&& n_of, bool receives) {
    for_peers([&](int peer) {
      const auto& each = transfers[static_cast<std::size_t>(peer)];
      operation_.waits_for = peer;
      for (std::size_t n = each ? n_of(peer) : 0; n > 0; --n) {
        receives ? static_cast<void>(each->wait_recv(peer)) : each->wait_send(peer);
      }
    });
  };
  const auto chunks = [&](int peer) { return chunks_in(slice(peer), chunk_); };
  wait(outs_, chunks, false);
  wait(results_, chunks, true);
  wait(
      handed_, [&](int peer) { return n_results_[static_cast<std::size_t>(peer)]; }, false);
}

void SliceReduce::run() {
  for (std::size_t c = 0; c < kWindow; ++c) expect_inputs(c);
  expect_results();
  send_inputs();
  for (std::size_t c = 0; c < chunks_in(mine_, chunk_); ++c) reduce_chunk(c);
  finish();
}

// The slice of a broadcast that rank `owner` passes on; the root has none.
// Slices of a broadcast need no alignment to elements: bytes are only moved.
Range pass_on(const Session& session, const Operation& operation, std::size_t n_bytes, int owner) {
  if (owner == operation.op.root) return {};
  const auto others = static_cast<std::size_t>(session.size - 1);
  const auto o = static_cast<std::size_t>(owner - (owner > operation.op.root ? 1 : 0));
  return {n_bytes * o / others, n_bytes * (o + 1) / others};
}

}  // namespace

void slice_reduce(Session& session, Operation& operation) {
  SliceReduce(session, operation).run();
}

void broadcast_in_slices(Session& session, Operation& operation, char* data, std::size_t n_bytes) {
  const int rank = session.rank, size = session.size, root = operation.op.root;
  const std::size_t chunk = chunk_bytes(size);
  const std::uint64_t slot = kDataSlot | operation.call.sequence << 8 | 3;
  const Range mine = pass_on(session, operation, n_bytes, rank);
  const auto index = [](int r) { return static_cast<std::size_t>(r); };
  std::vector<std::unique_ptr<Transfer>> ins(index(size)), outs(index(size));
  // Per peer: what comes from it, and what goes to it. From the root comes our own slice.
  const auto from = [&](int peer) {
    return peer == root ? mine : pass_on(session, operation, n_bytes, peer);
  };
  const auto to = [&](int peer) { return rank == root ? pass_on(session, operation, n_bytes, peer) : mine; };
  const auto send_chunk = [&](int peer, std::size_t c) {
    const Range range = to(peer), part = chunk_of(range, chunk, c);
    outs[index(peer)]->send(peer, slot, part.begin - range.begin, part.size());
  };
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    if (peer != root) {
      outs[index(peer)] = std::make_unique<Transfer>(session.stop_source, session.connections,
                                                     data + to(peer).begin, to(peer).size());
    }
    if (rank == root) continue;
    const Range range = from(peer);
    ins[index(peer)] = std::make_unique<Transfer>(session.stop_source, session.connections,
                                                  data + range.begin, range.size());
    for (std::size_t c = 0; c < chunks_in(range, chunk); ++c) {
      const Range part = chunk_of(range, chunk, c);
      ins[index(peer)]->recv(peer, slot, part.begin - range.begin, part.size());
    }
  }
  if (rank == root) {
    // Chunk by chunk, so that all ranks can begin to pass on.
    // An upper bound: slices differ by a byte, so their numbers of chunks may differ by one.
    const std::size_t most = chunks_in({0, n_bytes / index(size - 1) + 1}, chunk) + 1;
    for (std::size_t c = 0; c < most; ++c) {
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        if (c < chunks_in(to(peer), chunk)) send_chunk(peer, c);
      }
    }
  } else {
    operation.waits_for = root;
    for (std::size_t c = 0; c < chunks_in(mine, chunk); ++c) {
      ins[index(root)]->wait_recv(root);
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        if (peer != root) send_chunk(peer, c);
      }
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    operation.waits_for = peer;
    if (ins[index(peer)] && peer != root) {
      for (std::size_t c = chunks_in(from(peer), chunk); c > 0; --c) ins[index(peer)]->wait_recv(peer);
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    operation.waits_for = peer;
    if (outs[index(peer)]) {
      for (std::size_t c = chunks_in(to(peer), chunk); c > 0; --c) outs[index(peer)]->wait_send(peer);
    }
  }
}

}  // namespace lockstep::gloo_plugin
