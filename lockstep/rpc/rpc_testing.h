// For tests: workers as threads of one process, each with an agent of its own over a LocalExchange.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/rank_thread.h"
#include "lockstep/base/thread.h"
#include "lockstep/courier/local_courier.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/current.h"

namespace lockstep::rpc::testing {

// The error `fn` raises; fails the test when it raises none.
inline Failure caught(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.failure();
  }
  ADD_FAILURE() << "nothing was raised";
  return {};
}
inline bool says(const Failure& failure, const std::string& part) {
  return failure.message.find(part) != std::string::npos;
}

struct WorkersOptions {
  courier::LocalOptions exchange{};
  int num_worker_threads = 16;
  Milliseconds rpc_timeout{60'000};
};

// A handle on the workers while they run, for tests that kill one.
struct Workers {
  std::shared_ptr<courier::LocalExchange> exchange;
  std::vector<std::shared_ptr<Agent>> agents;
};

// Runs fn(rank, workers) on n threads, "worker0" to "worker<n-1>", each with its agent as the current one. `after` runs once, when all fn have
// returned and before the agents are closed. Throws again what the first of them threw.
inline void run_workers(int n, const std::function<void(int, Workers&)>& fn,
                        const WorkersOptions& options = {}, const std::function<void(Workers&)>& after = {}) {
  Workers workers{.exchange = courier::LocalExchange::create(options.exchange), .agents = {}};
  std::vector<RankThread> ranks(static_cast<std::size_t>(n));
  std::vector<Bytes> addresses;
  for (int i = 0; i < n; ++i) {
    auto courier = workers.exchange->join(static_cast<WorkerId>(i));
    addresses.push_back(courier->address());
    workers.agents.push_back(
        Agent::start({.self = {.id = static_cast<WorkerId>(i), .name = "worker" + std::to_string(i)},
                      .num_worker_threads = options.num_worker_threads,
                      .rpc_timeout = options.rpc_timeout,
                      .rank = &ranks[static_cast<std::size_t>(i)]},
                     std::move(courier)));
    const RankThreadScope scope(&ranks[static_cast<std::size_t>(i)]);
    set_current_agent(workers.agents.back());
  }
  for (auto& agent : workers.agents) {
    for (int i = 0; i < n; ++i) {
      agent->add_worker({.id = static_cast<WorkerId>(i), .name = "worker" + std::to_string(i)},
                        addresses[static_cast<std::size_t>(i)]);
    }
  }
  std::mutex mutex;
  std::exception_ptr first;
  const auto guarded = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  {
    std::vector<Thread> threads;
    for (int i = 0; i < n; ++i) {
      threads.emplace_back("worker " + std::to_string(i), [&, i] {
        const RankThreadScope scope(&ranks[static_cast<std::size_t>(i)]);
        guarded([&] { fn(i, workers); });
      });
    }
  }
  if (after) guarded([&] { after(workers); });
  for (auto& agent : workers.agents) {
    for (int i = 0; i < n; ++i) {
      if (agent->self().id != i) agent->remove_worker(static_cast<WorkerId>(i));
    }
  }
  for (auto& agent : workers.agents) agent->close();
  if (first) std::rethrow_exception(first);
}

}  // namespace lockstep::rpc::testing
