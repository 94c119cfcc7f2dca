// What the ranks of a communicator exchange first in every collective: their calls, each with its payload
// when that is small. A receive for the next call of every peer is always posted, so that a call takes half a
// round trip.
//
// Used by one thread at a time, the one that runs the communicator's collectives.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "engines/gloo/describe.h"
#include "engines/gloo/transfer.h"

namespace lockstep::gloo_plugin {

// Payload that travels with the call. Small enough to be copied, large enough for what latency decides.
inline constexpr std::size_t kInline = 4096;
inline constexpr std::size_t kMessage = sizeof(CallHeader) + kInline;

// gloo's slots: which message is meant, apart from who sends it. The highest bits are the kind.
inline constexpr std::uint64_t kCallSlot = 1ull << 60, kDataSlot = 2ull << 60, kTagSlot = 3ull << 60,
                               kTagDataSlot = 4ull << 60, kHelloSlot = 5ull << 60;

class Mailbox {
 public:
  Mailbox(StopSource& stop_source, Connections& connections, int rank, int size)
      : memory_(static_cast<std::size_t>(size) * 3 * kMessage) {
    out_ = std::make_unique<Transfer>(stop_source, connections, memory_.data(), memory_.size());
    in_.resize(static_cast<std::size_t>(size) * 2);
    expected_.resize(in_.size());
    for (int peer = 0; peer < size; ++peer) {
      for (int turn = 0; turn < 2 && peer != rank; ++turn) {
        in_[index(peer, turn)] =
            std::make_unique<Transfer>(stop_source, connections, box(peer, turn), kMessage);
      }
      if (peer != rank) expect(peer, 1);
    }
  }

  // Copies and starts sending. Pre: n_bytes <= kInline, and one message per peer until flush.
  void send(int to, const CallHeader& call, const void* payload, std::size_t n_bytes) {
    char* message = box(to, 2);
    std::memcpy(message, &call, sizeof call);
    if (n_bytes > 0) std::memcpy(message + sizeof call, payload, n_bytes);
    out_->send(to, kCallSlot, static_cast<std::size_t>(message - memory_.data()), sizeof call + n_bytes);
    sent_.push_back(to);
  }
  // The next call of `from`. The message stays valid until the one after it is received.
  const char* receive(int from, std::uint64_t sequence) {
    if (!expected_[index(from, sequence % 2)]) throw PairFailed{from, "it hung up"};
    in_[index(from, sequence % 2)]->wait_recv(from);
    expect(from, sequence + 1);
    return box(from, sequence % 2);
  }
  // Waits until all that was sent has been taken.
  void flush() {
    for (const int to : sent_) out_->wait_send(to);
    sent_.clear();
  }

 private:
  std::size_t index(int peer, std::uint64_t turn) const { return static_cast<std::size_t>(peer) * 2 + turn; }
  // Turns 0 and 1 are for incoming messages, 2 for the outgoing one.
  char* box(int peer, std::uint64_t turn) {
    return memory_.data() + (static_cast<std::size_t>(peer) * 3 + turn) * kMessage;
  }
  // A peer may leave once it has received everything: that fails the next call, not this one.
  void expect(int peer, std::uint64_t sequence) {
    const std::size_t at = index(peer, sequence % 2);
    try {
      in_[at]->recv(peer, kCallSlot, 0, kMessage);
      expected_[at] = true;
    } catch (const PairFailed&) {
      expected_[at] = false;
    }
  }

  std::vector<char> memory_;
  std::unique_ptr<Transfer> out_;
  std::vector<std::unique_ptr<Transfer>> in_;
  std::vector<bool> expected_;  // in_: a receive is posted
  std::vector<int> sent_;
};

}  // namespace lockstep::gloo_plugin
