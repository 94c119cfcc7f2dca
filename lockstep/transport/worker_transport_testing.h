// For tests of WorkerTransport beyond the contract.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/fork_testing.h"
#include "lockstep/transport/transport_contract.h"
#include "lockstep/transport/worker_transport.h"

namespace lockstep::transport::worker_testing {

inline std::unique_ptr<Transport> open(WorkerId id, WorkerTransportOptions options = {}) {
  options.id = id;
  options.name = base::cat("worker", id);
  return open_worker_transport(std::move(options));
}

inline void introduce(Transport& a, WorkerId a_id, Transport& b, WorkerId b_id) {
  a.add_peer(b_id, base::cat("worker", b_id), b.address());
  b.add_peer(a_id, base::cat("worker", a_id), a.address());
}

// Polls several transports from one thread until the first has something.
inline std::optional<Event> next(const std::vector<Transport*>& all) {
  const Deadline deadline = patience();
  while (!deadline.expired()) {
    for (Transport* one : all) {
      auto event = one->poll();
      if (event && one == all.front()) return event;
      if (event) ADD_FAILURE() << "something for another: " << event->cause;
    }
  }
  return std::nullopt;
}

class Host : public ::testing::TestWithParam<Route> {};

// In a forked child, which ends when it fails.
inline void send(Transport& transport, int to, Message message) {
  const auto failure = transport.send(static_cast<WorkerId>(to), std::move(message), patience());
  CHILD_EXPECT(!failure, failure->message);
}

}  // namespace lockstep::transport::worker_testing
