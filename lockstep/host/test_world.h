// Ranks for the host engine's tests: threads of this process, or forked processes, over the C table, with a
// key-value space of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/base.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/host.h"

namespace lockstep::comm::testing {

// Keys in a map, for ranks that are threads.
class MapKv {
 public:
  void set(const std::string& key, std::string value) {
    const std::lock_guard lock(mutex_);
    map_[key] = std::move(value);
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.time_point(), [&] { return map_.contains(key); }))
      return std::nullopt;
    return map_[key];
  }
  lockstep_host host() {
    return {.struct_size = sizeof(lockstep_host),
            .context = this,
            .log = nullptr,
            .kv_set =
                [](void* self, const char* key, const void* value, size_t length) {
                  static_cast<MapKv*>(self)->set(key, std::string(static_cast<const char*>(value), length));
                  return LOCKSTEP_OK;
                },
            .kv_get =
                [](void* self, const char* key, void* value, size_t capacity, size_t* length,
                   int64_t deadline_ns) {
                  const auto found =
                      static_cast<MapKv*>(self)->get(key, Deadline::from_monotonic_ns(deadline_ns));
                  if (!found) return LOCKSTEP_TIMEOUT;
                  *length = found->size();
                  std::memcpy(value, found->data(), std::min(capacity, found->size()));
                  return LOCKSTEP_OK;
                }};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> map_;
};

// One rank's end, with the calls tests make.
class Rank {
 public:
  Rank(const lockstep_host* host, int rank, int size, Milliseconds timeout = Milliseconds(20'000))
      : rank_(rank), size_(size) {
    const lockstep_comm_config config{.struct_size = sizeof(config),
                                      .host = host,
                                      .rank = rank,
                                      .size = size,
                                      .name = "test",
                                      .deadline_ns = Deadline::after(timeout).monotonic_ns()};
    char error[512];
    if (engine().comm_create(&config, &comm_, error, sizeof(error)) != LOCKSTEP_OK)
      raise(ErrorKind::kInternal, error);
  }
  ~Rank() {
    if (comm_ != nullptr) engine().comm_destroy(comm_, nullptr);
  }
  Rank(const Rank&) = delete;

  static const lockstep_engine& engine() { return *host_engine(); }
  int rank() const { return rank_; }
  int size() const { return size_; }
  lockstep_comm* comm() { return comm_; }
  void destroy(const char* cause = nullptr) {
    engine().comm_destroy(comm_, cause);
    comm_ = nullptr;
  }

  static lockstep_op op(lockstep_op_kind kind, const void* send, void* recv, std::uint64_t count,
                        lockstep_dtype dtype = LOCKSTEP_F32, Milliseconds timeout = Milliseconds(20'000)) {
    return {.struct_size = sizeof(lockstep_op),
            .kind = kind,
            .dtype = dtype,
            .reduce = LOCKSTEP_SUM,
            .root = 0,
            .send = send,
            .recv = recv,
            .count = count,
            .deadline_ns = Deadline::after(timeout).monotonic_ns(),
            .where = "test.cpp:1"};
  }
  lockstep_status run(const lockstep_op& op) { return engine().run(comm_, &op, error_, sizeof(error_)); }
  lockstep_status all_reduce(std::vector<float>& x) {
    return run(op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), x.size()));
  }
  lockstep_status barrier() { return run(op(LOCKSTEP_BARRIER, nullptr, nullptr, 0)); }
  std::string error() const { return error_; }

  struct Loss {
    lockstep_status status;
    std::string error;
    std::int32_t rank = -1;
    std::int64_t pid = -1;
    std::string cause;
  };
  Loss failure() {
    Loss loss{};
    char error[1024] = {}, cause[128] = {};
    loss.status =
        engine().comm_failure(comm_, error, sizeof(error), &loss.rank, &loss.pid, cause, sizeof(cause));
    loss.error = error;
    loss.cause = cause;
    return loss;
  }

 private:
  const int rank_, size_;
  lockstep_comm* comm_ = nullptr;
  char error_[1024] = {};
};

// Runs body(rank) on one thread per rank.
inline void with_threads(int size, const std::function<void(Rank&)>& body) {
  MapKv kv;
  const lockstep_host host = kv.host();
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(&host, r, size);
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace lockstep::comm::testing
