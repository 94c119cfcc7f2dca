// Ranks for tests of engines, over the C table and with a key-value space of the test's own: a map for ranks
// that are threads of this process, a folder for forked processes. For tests only; not installed.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/engine/test_memory.h"

namespace lockstep::comm::testing {

// All keys of a job. Thread safe; outlives the spaces made from it.
class Kv {
 public:
  virtual ~Kv() = default;
  virtual void set(const std::string& key, std::string value) = 0;
  virtual std::optional<std::string> get(const std::string& key, Deadline deadline) = 0;
};

// Keys in a map, for ranks that are threads.
class MapKv final : public Kv {
 public:
  void set(const std::string& key, std::string value) override {
    const std::lock_guard lock(mutex_);
    map_[key] = std::move(value);
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.time_point(), [&] { return map_.contains(key); }))
      return std::nullopt;
    return map_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> map_;
};

// Counts what it is asked for.
class CountingKv final : public Kv {
 public:
  void set(const std::string& key, std::string value) override {
    ++n_calls;
    map_.set(key, std::move(value));
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    ++n_calls;
    auto value = map_.get(key, deadline);
    if (!value) ++n_in_vain;
    return value;
  }
  std::atomic<int> n_calls{0};
  std::atomic<int> n_in_vain{0};  // of them: until a deadline, perhaps to look again

 private:
  MapKv map_;
};

// One file per key, renamed into place, for ranks that are processes.
class FolderKv final : public Kv {
 public:
  FolderKv() : path_(std::filesystem::temp_directory_path() / ("lockstep-test-" + base::random_hex(8))) {
    std::filesystem::create_directory(path_);
  }
  ~FolderKv() override { std::filesystem::remove_all(path_); }
  void set(const std::string& key, std::string value) override {
    const auto to = file(key);
    const auto draft = to.string() + "." + base::random_hex(4);
    std::ofstream(draft).write(value.data(), static_cast<std::streamsize>(value.size()));
    std::filesystem::rename(draft, to);
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    const auto from = file(key);
    while (!std::filesystem::exists(from)) {
      if (deadline.expired()) return std::nullopt;
      ::usleep(500);
    }
    std::ifstream in(from);
    return std::string((std::istreambuf_iterator<char>(in)), {});
  }

 private:
  std::filesystem::path file(std::string key) const {
    for (char& c : key) c = c == '/' ? '%' : c;
    return path_ / key;
  }
  const std::filesystem::path path_;
};

// The part of a Kv that belongs to one communicator, in the form an engine takes it.
class KvSpace {
 public:
  explicit KvSpace(Kv& kv, std::string name = "")
      : kv_(kv),
        prefix_(name.empty() ? "" : name + "/"),
        host_{.struct_size = sizeof(lockstep_host),
              .context = this,
              .log = nullptr,
              .kv_set = set,
              .kv_get = get} {}
  KvSpace(const KvSpace&) = delete;
  const lockstep_host* host() const { return &host_; }

 private:
  std::string key_of(const char* key) const { return *key == '/' ? key : prefix_ + key; }
  static lockstep_status set(void* self, const char* key, const void* value, size_t length) {
    auto* space = static_cast<KvSpace*>(self);
    space->kv_.set(space->key_of(key), std::string(static_cast<const char*>(value), length));
    return LOCKSTEP_OK;
  }
  static lockstep_status get(void* self, const char* key, void* value, size_t capacity, size_t* length,
                             int64_t deadline_ns) {
    auto* space = static_cast<KvSpace*>(self);
    const auto found = space->kv_.get(space->key_of(key), Deadline::from_monotonic_ns(deadline_ns));
    if (!found) return LOCKSTEP_TIMEOUT;
    *length = found->size();
    if (capacity > 0) std::memcpy(value, found->data(), std::min(capacity, found->size()));
    return LOCKSTEP_OK;
  }

  Kv& kv_;
  const std::string prefix_;
  lockstep_host host_;
};

inline constexpr Milliseconds kPatience{60'000};  // ends a broken run; nothing that works takes as long

// One rank's end, with the calls tests make. With a TestMemory, operations on host memory that go through run, post
// and finish are made on the device instead: buffers are copied there before, and back when the operation has
// completed. Operations that name a device are made as they are.
class EngineRank {
 public:
  struct Options {
    Milliseconds timeout = kPatience;
    std::string name = "test";
    lockstep_comm* parent = nullptr;
    std::vector<std::int32_t> parent_ranks = {};
    std::string key = {};          // "": none
    TestMemory* memory = nullptr;  // outlives this; null: host memory
  };
  // Collective; raises the engine's error. `host` outlives this.
  EngineRank(const lockstep_engine& table, const lockstep_host* host, int rank, int size,
             const Options& options)
      : table_(table), rank_(rank), size_(size), memory_(options.memory) {
    const lockstep_comm_config config{
        .struct_size = sizeof(config),
        .host = host,
        .rank = rank,
        .size = size,
        .name = options.name.c_str(),
        .deadline_ns = Deadline::after(options.timeout).monotonic_ns(),
        .parent = options.parent,
        .parent_ranks = options.parent == nullptr ? nullptr : options.parent_ranks.data(),
        .engine = &table,
        .key = options.key.empty() ? nullptr : options.key.c_str(),
        .device_kind = memory_ == nullptr ? LOCKSTEP_HOST_MEMORY : memory_->device_kind(),
        .device = memory_ == nullptr ? 0 : memory_->device()};
    char error[512] = "";
    if (table.comm_create(&config, &comm_, error, sizeof(error)) != LOCKSTEP_OK)
      base::raise(ErrorKind::kInternal, error);
  }
  ~EngineRank() { destroy(); }
  EngineRank(const EngineRank&) = delete;

  const lockstep_engine& table() const { return table_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  lockstep_comm* comm() { return comm_; }
  TestMemory* memory() const { return memory_; }
  void destroy(const char* cause = nullptr) {
    for (; !idle_.empty(); idle_.pop_back()) table_.free(comm_, idle_.back().second);
    if (comm_ != nullptr) table_.comm_destroy(std::exchange(comm_, nullptr), cause);
  }

  // Memory of the engine, cached for the next caller: returning pages takes longer than most tests.
  std::pair<std::size_t, void*> take_memory(std::size_t n_bytes) {
    const auto fits =
        std::find_if(idle_.begin(), idle_.end(), [&](const auto& one) { return one.first >= n_bytes; });
    if (fits != idle_.end()) {
      const auto found = *fits;
      idle_.erase(fits);
      return found;
    }
    void* memory = nullptr;
    const auto status = memory_ == nullptr ? table_.alloc(comm_, n_bytes, &memory)
                                           : table_.alloc_on(comm_, memory_->device_kind(), memory_->device(),
                                                             n_bytes, &memory);
    if (status != LOCKSTEP_OK) base::raise(ErrorKind::kResource, "alloc failed");
    return {n_bytes, memory};
  }
  void give_memory(std::pair<std::size_t, void*> memory) { idle_.push_back(memory); }

  static lockstep_op op(lockstep_op_kind kind, const void* send, void* recv, std::uint64_t count,
                        lockstep_dtype dtype = LOCKSTEP_F32, Milliseconds timeout = kPatience) {
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
  // Posts and waits, or runs where the engine can; the message of a failure in error(). On a device it waits for the
  // stream, and what the operation came to is asked of the communicator.
  lockstep_status run(const lockstep_op& op) {
    error_[0] = '\0';
    if (table_.run == nullptr) return post_and_wait(op);
    DeviceBuffers buffers(*this);
    const lockstep_op placed = buffers.place(op);
    auto status = table_.run(comm_, &placed, error_, sizeof(error_));
    if (memory_ == nullptr || status != LOCKSTEP_OK) return status;
    memory_->synchronize(placed.stream);
    if (const Loss loss = failure(); loss.status != LOCKSTEP_OK) {
      loss.error.copy(error_, sizeof(error_) - 1);
      status = loss.status;
    }
    if (status == LOCKSTEP_OK) buffers.copy_back();
    return status;
  }
  lockstep_status post_and_wait(const lockstep_op& op) {
    lockstep_handle* handle = nullptr;
    const lockstep_status posted = try_post(op, &handle);
    return posted == LOCKSTEP_OK ? finish(handle) : posted;
  }
  // Pre: the engine accepts the operation.
  lockstep_handle* post(const lockstep_op& op) {
    lockstep_handle* handle = nullptr;
    const auto status = try_post(op, &handle);
    if (status != LOCKSTEP_OK) base::raise(ErrorKind::kInternal, base::cat("post gave status ", status));
    return handle;
  }
  // Waits until it has completed and releases it.
  lockstep_status finish(lockstep_handle* handle) {
    const lockstep_status status = table_.wait(handle, LOCKSTEP_NEVER);
    if (status != LOCKSTEP_OK) table_.last_error(handle, error_, sizeof(error_));
    table_.release(handle);
    if (const auto posted = posted_.find(handle); posted != posted_.end()) {
      if (status == LOCKSTEP_OK) posted->second->copy_back();
      posted_.erase(posted);
    }
    return status;
  }
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
        table_.comm_failure(comm_, error, sizeof(error), &loss.rank, &loss.pid, cause, sizeof(cause));
    loss.error = error;
    loss.cause = cause;
    return loss;
  }

  // Host memory that stands for device memory of the same length: an operation on any part of it is made on that
  // part of the device memory, which takes over its contents before and gives them back afterwards.
  struct Twin {
    std::uint8_t* host;
    std::size_t n_bytes;
    std::uint8_t* device;
  };
  // Pre: memory(). Removed by the same host memory, when no operation uses it.
  void add_twin(const Twin& twin) { twins_.push_back(twin); }
  void remove_twin(const std::uint8_t* host) {
    std::erase_if(twins_, [&](const Twin& twin) { return twin.host == host; });
  }

 private:
  // What one operation on host memory uses on the device instead.
  class DeviceBuffers {
   public:
    explicit DeviceBuffers(EngineRank& rank) : rank_(rank) {}
    ~DeviceBuffers() {
      for (const Twin& twin : own_) rank_.memory_->free(twin.device, twin.n_bytes);
    }
    DeviceBuffers(const DeviceBuffers&) = delete;

    lockstep_op place(lockstep_op op) {
      if (rank_.memory_ == nullptr || op.device_kind != LOCKSTEP_HOST_MEMORY) return op;
      const auto n = static_cast<std::uint64_t>(rank_.size_);
      const std::uint64_t width = op.count * size_of(op.dtype);
      const bool sends_to_each =
          op.kind == LOCKSTEP_REDUCE_SCATTER || op.kind == LOCKSTEP_SCATTER || op.kind == LOCKSTEP_ALL_TO_ALL;
      const bool gets_of_each =
          op.kind == LOCKSTEP_ALL_GATHER || op.kind == LOCKSTEP_GATHER || op.kind == LOCKSTEP_ALL_TO_ALL;
      op.send = on_device(op.send, sends_to_each ? width * n : width);
      op.recv = on_device(op.recv, gets_of_each ? width * n : width);
      rank_.memory_->place(op);
      return op;
    }
    void copy_back() {
      for (const Twin& twin : used_) rank_.memory_->copy_out(twin.host, twin.device, twin.n_bytes);
    }

   private:
    void* on_device(const void* host, std::uint64_t n_bytes) {
      if (host == nullptr) return nullptr;
      auto* const at = static_cast<std::uint8_t*>(const_cast<void*>(host));
      const auto holds = [&](const Twin& twin) { return at >= twin.host && at < twin.host + twin.n_bytes; };
      for (const auto* twins : {&used_, &rank_.twins_}) {
        const auto found = std::find_if(twins->begin(), twins->end(), holds);
        if (found == twins->end()) continue;
        const Twin twin = *found;
        if (twins != &used_) use(twin);
        return twin.device + (at - twin.host);
      }
      // Nothing still gets an address, as on the host.
      own_.push_back({at, n_bytes, static_cast<std::uint8_t*>(rank_.memory_->allocate(n_bytes))});
      use(own_.back());
      return own_.back().device;
    }
    void use(const Twin& twin) {
      rank_.memory_->copy_in(twin.device, twin.host, twin.n_bytes);
      used_.push_back(twin);
    }

    EngineRank& rank_;
    std::vector<Twin> own_, used_;
  };

  // Allocates nothing of its own for an operation on host memory: tests refuse memory inside this call.
  lockstep_status try_post(const lockstep_op& op, lockstep_handle** handle) {
    if (memory_ == nullptr) return table_.post(comm_, &op, handle);
    auto buffers = std::make_unique<DeviceBuffers>(*this);
    const lockstep_op placed = buffers->place(op);
    const auto status = table_.post(comm_, &placed, handle);
    if (status == LOCKSTEP_OK) posted_[*handle] = std::move(buffers);
    return status;
  }

  const lockstep_engine& table_;
  const int rank_, size_;
  lockstep_comm* comm_ = nullptr;
  TestMemory* const memory_;
  char error_[1024] = {};
  std::vector<std::pair<std::size_t, void*>> idle_;
  std::vector<Twin> twins_;
  std::map<lockstep_handle*, std::unique_ptr<DeviceBuffers>> posted_;
};

}  // namespace lockstep::comm::testing
