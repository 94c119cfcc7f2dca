// For tests: workers as threads of one process, each with an agent of its own over an InProcessExchange.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/rpc/current.h"
#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/transport/in_process_transport.h"

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
inline ::testing::AssertionResult says(const Failure& failure, const std::string& part) {
  if (failure.message.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << failure.message;
}

// Waits for an event; fails the test when it does not come.
inline void until(const std::function<bool()>& holds, const std::string& what = "it never happened") {
  const auto deadline = Deadline::after(Milliseconds(30'000));
  while (!holds()) {
    ASSERT_FALSE(deadline.expired()) << what;
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

// Blocks every thread in pass() until it is opened; with a timeout, so that a test that fails ends.
class Gate {
 public:
  void open() { open_ = true; }
  void pass() {
    ++n_came_;
    const auto deadline = Deadline::after(Milliseconds(40'000));
    while (!open_ && !deadline.expired()) std::this_thread::sleep_for(Milliseconds(1));
  }
  int n_came() const { return n_came_; }

 private:
  std::atomic<bool> open_{false};
  std::atomic<int> n_came_{0};
};

// A transport that forwards to another, for tests that override some of it.
class TransportWrapper : public transport::Transport {
 public:
  explicit TransportWrapper(std::unique_ptr<transport::Transport> inner) : inner_(std::move(inner)) {}
  Bytes address() const override { return inner_->address(); }
  void add_peer(WorkerId id, const std::string& name, const Bytes& address) override {
    inner_->add_peer(id, name, address);
  }
  void remove_peer(WorkerId id) override { inner_->remove_peer(id); }
  std::optional<Failure> send(WorkerId to, transport::Message message, Deadline deadline) override {
    return inner_->send(to, std::move(message), deadline);
  }
  std::optional<transport::Event> poll() override { return inner_->poll(); }
  void wait(Deadline deadline) override { inner_->wait(deadline); }
  void wake() noexcept override { inner_->wake(); }
  void begin_polling() noexcept override { inner_->begin_polling(); }
  void end_polling() noexcept override { inner_->end_polling(); }
  void close(Deadline deadline) override { inner_->close(deadline); }

 private:
  const std::unique_ptr<transport::Transport> inner_;
};

// Rejects longer messages, as a transport with a limit does.
class ShortTransport final : public TransportWrapper {
 public:
  ShortTransport(std::unique_ptr<transport::Transport> inner, std::size_t n_bytes)
      : TransportWrapper(std::move(inner)), n_bytes_(n_bytes) {}
  std::optional<Failure> send(WorkerId to, transport::Message message, Deadline deadline) override {
    if (message.body.bytes.size() > n_bytes_) {
      return Failure{.kind = ErrorKind::kUsage, .message = "the message is beyond the limit"};
    }
    return TransportWrapper::send(to, std::move(message), deadline);
  }

 private:
  const std::size_t n_bytes_;
};

struct WorkersOptions {
  transport::InProcessOptions exchange{};
  int num_worker_threads = 16;
  Milliseconds rpc_timeout{60'000};
  std::function<std::unique_ptr<transport::Transport>(WorkerId, std::unique_ptr<transport::Transport>)>
      wrap{};
  std::vector<Extension> extensions{};
  std::map<int, DeviceMaps> device_maps{};  // by worker

  DeviceMaps maps_of(int worker) const {
    const auto found = device_maps.find(worker);
    return found == device_maps.end() ? DeviceMaps{} : found->second;
  }
};

// A handle on the workers while they run, for tests that kill one.
struct Workers {
  std::shared_ptr<transport::InProcessExchange> exchange;
  std::vector<std::shared_ptr<Agent>> agents;
};

// Runs fn(rank, workers) on n threads, "worker0" to "worker<n-1>", each with its agent as the current one.
// `after` runs once, when all fn have returned and before the agents are closed. Throws again what the first
// of them threw.
inline void run_workers(int n, const std::function<void(int, Workers&)>& fn,
                        const WorkersOptions& options = {}, const std::function<void(Workers&)>& after = {}) {
  Workers workers{.exchange = transport::InProcessExchange::create(options.exchange), .agents = {}};
  std::vector<base::RankThread> ranks(static_cast<std::size_t>(n));
  std::vector<Bytes> addresses;
  for (int i = 0; i < n; ++i) {
    auto transport = workers.exchange->join(static_cast<WorkerId>(i));
    addresses.push_back(transport->address());
    if (options.wrap) transport = options.wrap(static_cast<WorkerId>(i), std::move(transport));
    workers.agents.push_back(
        Agent::start({.self = {.id = static_cast<WorkerId>(i), .name = "worker" + std::to_string(i)},
                      .num_worker_threads = options.num_worker_threads,
                      .rpc_timeout = options.rpc_timeout,
                      .rank = &ranks[static_cast<std::size_t>(i)],
                      .device_maps = options.maps_of(i),
                      .extensions = options.extensions},
                     std::move(transport)));
    const base::RankThreadScope scope(&ranks[static_cast<std::size_t>(i)]);
    set_current_agent(workers.agents.back());
  }
  for (auto& agent : workers.agents) {
    for (int i = 0; i < n; ++i) {
      agent->add_worker({.id = static_cast<WorkerId>(i), .name = "worker" + std::to_string(i)},
                        addresses[static_cast<std::size_t>(i)], options.maps_of(i)[agent->self().name]);
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
    std::vector<base::Thread> threads;
    for (int i = 0; i < n; ++i) {
      threads.emplace_back("worker " + std::to_string(i), [&, i] {
        const base::RankThreadScope scope(&ranks[static_cast<std::size_t>(i)]);
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

// As `after`: every worker drops its RRefs and waits; then nothing may be left.
inline void expect_no_rrefs(Workers& workers) {
  for (auto& agent : workers.agents) rref_manager(*agent).drop_users();
  for (int round = 0; round < 3; ++round) {
    for (auto& agent : workers.agents) {
      EXPECT_TRUE(rref_manager(*agent).wait_idle(Deadline::after(Milliseconds(10'000))));
    }
  }
  for (auto& agent : workers.agents) {
    EXPECT_EQ(rref_manager(*agent).leaks(), "");
    const auto info = agent->debug_info();
    for (const char* name :
         {"num_owner_rrefs", "num_forks", "num_users", "num_pending_users", "num_pending_futures"}) {
      EXPECT_EQ(info.at(name), "0") << name << " of " << agent->self().name;
    }
  }
}

}  // namespace lockstep::rpc::testing
