// The contract suite of Transport: what every transport must do, written once in transport_contract.cpp. To
// add a transport, say how to open it and compile that file into its test program:
//
//   INSTANTIATE_TEST_SUITE_P(Mine, TransportContract,
//                            testing::Values(TransportKind{"Mine", [] { return my_opener(); }}));
//
// For tests only; not installed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/transport/transport.h"

namespace lockstep::transport {

using TransportOpener = std::function<std::unique_ptr<Transport>(WorkerId)>;

struct TransportKind {
  std::string name;
  std::function<TransportOpener()> world;  // an opener per test
  friend std::ostream& operator<<(std::ostream& out, const TransportKind& kind) { return out << kind.name; }
};

// Long enough for a slow machine, short enough to end a broken run.
inline Deadline patience() {
  return Deadline::after(Milliseconds(60'000));
}

// Bytes that depend on their position, so that shifted or mixed-up data is detected.
inline Bytes pattern(std::size_t n_bytes, std::uint64_t seed) {
  Bytes bytes(n_bytes);
  for (std::size_t i = 0; i < n_bytes; ++i)
    bytes[i] = static_cast<std::uint8_t>((i + seed) * 2654435761u >> 13);
  return bytes;
}
inline bool is_pattern(std::span<const std::uint8_t> bytes, std::size_t n_bytes, std::uint64_t seed) {
  const Bytes want = pattern(n_bytes, seed);
  return std::ranges::equal(bytes, want);
}
inline Message message_of(std::uint64_t id, std::size_t body, const std::vector<std::size_t>& blobs = {}) {
  Message message{.kind = 7, .id = id, .body = owned_blob(pattern(body, id))};
  for (const std::size_t size : blobs) message.blobs.push_back(owned_blob(pattern(size, id + size)));
  return message;
}
inline bool is_message(const Message& message, std::uint64_t id, std::size_t body,
                       const std::vector<std::size_t>& blobs = {}) {
  if (message.kind != 7 || message.id != id || !is_pattern(message.body.bytes, body, id)) return false;
  if (message.blobs.size() != blobs.size()) return false;
  for (std::size_t i = 0; i < blobs.size(); ++i) {
    if (!is_pattern(message.blobs[i].bytes, blobs[i], id + blobs[i])) return false;
  }
  return true;
}

// Blocks in wait() between polls.
inline std::optional<Event> next_event(Transport& transport, Deadline deadline = patience()) {
  for (;;) {
    if (auto event = transport.poll()) return event;
    if (deadline.expired()) return std::nullopt;
    transport.wait(deadline);
  }
}

class TransportContract : public testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override { open_ = GetParam().world(); }

  // Workers 0 to n - 1 that know each other.
  void start(int n) {
    for (int i = 0; i < n; ++i) workers_.push_back(open_(static_cast<WorkerId>(i)));
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) {
        if (i != j) at(i).add_peer(static_cast<WorkerId>(j), name(j), at(j).address());
      }
    }
  }
  static std::string name(int i) { return "worker" + std::to_string(i); }
  Transport& at(int i) { return *workers_[static_cast<std::size_t>(i)]; }

  // The next event of one worker, with one thread for all: every worker is polled meanwhile.
  std::optional<Event> next(int i) {
    const Deadline deadline = patience();
    auto& mine = came_[i];
    while (mine.empty() && !deadline.expired()) {
      for (std::size_t j = 0; j < workers_.size(); ++j) {
        if (!workers_[j]) continue;
        while (auto event = workers_[j]->poll()) came_[static_cast<int>(j)].push_back(std::move(*event));
      }
    }
    if (mine.empty()) return std::nullopt;
    Event event = std::move(mine.front());
    mine.pop_front();
    return event;
  }
  void expect_sent(int from, int to, Message message) {
    const auto failure = at(from).send(static_cast<WorkerId>(to), std::move(message), patience());
    EXPECT_FALSE(failure) << failure->message;
  }

  TransportOpener open_;
  std::vector<std::unique_ptr<Transport>> workers_;
  std::map<int, std::deque<Event>> came_;
};

}  // namespace lockstep::transport
