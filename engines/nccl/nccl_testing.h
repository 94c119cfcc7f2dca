// Ranks for tests of the NCCL plug-in: threads over the fake driver and the fake NCCL, each with a device and a stream of its
// own. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engines/cuda/resources.h"
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::nccl_plugin {

// Before the fake driver is initialised, which is when it reads them: a GPU for each rank, and kernels that are loaded without
// waiting, as NCCL's are.
inline const bool kEnvironmentIsSet = [] {
  return ::setenv("FAKE_CUDA_DEVICES", "8", 1) == 0 && ::setenv("FAKE_CUDA_RELAXED", "1", 1) == 0;
}();

inline const lockstep_engine& plugin() {
  static const comm::Engine engine = comm::load_engine(path_testing::from_program(NCCL_PLUGIN));
  return engine.table();
}

// Floats on a device.
class DeviceFloats {
 public:
  DeviceFloats(const cuda::PrimaryContext& gpu, const std::vector<float>& values)
      : gpu_(gpu), n_(values.size()), memory_(cuda::allocate(gpu, std::max<std::size_t>(4, n_ * 4))) {
    set(values);
  }
  void* data() const { return reinterpret_cast<void*>(memory_.get()); }
  std::size_t size() const { return n_; }
  void set(const std::vector<float>& values) {
    const cuda::ContextScope scope(gpu_);
    gpu_.driver().memcpy(memory_.get(), reinterpret_cast<cuda::DevicePtr>(values.data()), n_ * 4);
  }
  // As they are now: not ordered after any stream.
  std::vector<float> get() const {
    const cuda::ContextScope scope(gpu_);
    std::vector<float> values(n_);
    gpu_.driver().memcpy(reinterpret_cast<cuda::DevicePtr>(values.data()), memory_.get(), n_ * 4);
    return values;
  }

 private:
  const cuda::PrimaryContext& gpu_;
  const std::size_t n_;
  cuda::DeviceMemory memory_;
};

class NcclRank {
 public:
  struct Options {
    int device = -1;  // that operations use; -1: the one of the rank's number
    bool bind = false;
    const char* options = nullptr;
    Milliseconds timeout{60'000};
  };
  NcclRank(comm::testing::Kv& kv, int rank, int size, const Options& given, const std::string& name = "world")
      : space_(kv, name), rank_(rank), size_(size) {
    std::string why;
    const cuda::Driver* const driver = cuda::Driver::find(&why);
    if (driver == nullptr) throw std::runtime_error(why);
    gpu_ = &cuda::PrimaryContext::of(*driver, given.device < 0 ? rank : given.device);
    stream_ = cuda::create_stream(*gpu_, cuda::Priority::kLeast);
    const lockstep_comm_config config{.struct_size = sizeof config,
                                      .host = space_.host(),
                                      .rank = rank,
                                      .size = size,
                                      .name = name.c_str(),
                                      .deadline_ns = Deadline::after(given.timeout).monotonic_ns(),
                                      .parent = nullptr,
                                      .parent_ranks = nullptr,
                                      .engine = &plugin(),
                                      .key = nullptr,
                                      .device_kind = given.bind ? LOCKSTEP_CUDA : LOCKSTEP_HOST_MEMORY,
                                      .device = gpu_->device(),
                                      .options = given.options};
    char error[1024] = "";
    status_ = plugin().comm_create(&config, &comm_, error, sizeof error);
    error_ = error;
  }
  ~NcclRank() { destroy(); }
  NcclRank(const NcclRank&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  lockstep_comm* comm() const { return comm_; }
  lockstep_status status() const { return status_; }  // of comm_create
  const std::string& error() const { return error_; }
  const cuda::PrimaryContext& gpu() const { return *gpu_; }
  cuda::Stream stream() const { return stream_.get(); }
  void destroy(const char* cause = nullptr) {
    if (comm_ != nullptr) plugin().comm_destroy(std::exchange(comm_, nullptr), cause);
  }

  DeviceFloats floats(const std::vector<float>& values) const { return {*gpu_, values}; }
  lockstep_op op(lockstep_op_kind kind, void* send, void* recv, std::uint64_t count,
                 Milliseconds timeout = Milliseconds(60'000)) const {
    return {.struct_size = sizeof(lockstep_op),
            .kind = kind,
            .dtype = LOCKSTEP_F32,
            .reduce = LOCKSTEP_SUM,
            .root = 0,
            .send = send,
            .recv = recv,
            .count = count,
            .deadline_ns = Deadline::after(timeout).monotonic_ns(),
            .where = "test.cpp:1",
            .device_kind = LOCKSTEP_CUDA,
            .device = gpu_->device(),
            .stream = stream_.get()};
  }
  lockstep_op all_reduce(const DeviceFloats& x, Milliseconds timeout = Milliseconds(60'000)) const {
    return op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), x.size(), timeout);
  }
  lockstep_op message(lockstep_op_kind kind, const DeviceFloats& x, int peer, int tag) const {
    auto made = op(kind, x.data(), x.data(), x.size());
    made.root = peer;
    made.tag = tag;
    return made;
  }
  lockstep_status run(const lockstep_op& given) {
    char error[1024] = "";
    const auto status = plugin().run(comm_, &given, error, sizeof error);
    error_ = error;
    return status;
  }
  // The same, and everything in the stream has run: buffers may be read and freed.
  lockstep_status run_through(const lockstep_op& given) {
    const auto status = run(given);
    synchronize();
    return status;
  }
  lockstep_handle* post(const lockstep_op& given) {
    lockstep_handle* handle = nullptr;
    EXPECT_EQ(plugin().post(comm_, &given, &handle), LOCKSTEP_OK);
    return handle;
  }
  // Waits on the host and releases.
  lockstep_status finish(lockstep_handle* handle) {
    const auto status = plugin().wait(handle, LOCKSTEP_NEVER);
    char error[1024] = "";
    plugin().last_error(handle, error, sizeof error);
    error_ = error;
    plugin().release(handle);
    return status;
  }
  // Everything in the rank's stream has run.
  void synchronize() const {
    const cuda::ContextScope scope(*gpu_);
    gpu_->driver().stream_synchronize(stream_.get());
  }
  bool stream_is_idle() const {
    const cuda::ContextScope scope(*gpu_);
    return gpu_->driver().stream_query(stream_.get()) != cuda::kNotReady;
  }
  comm::testing::EngineRank::Loss failure() const {
    comm::testing::EngineRank::Loss loss{};
    char error[1024] = {}, cause[128] = {};
    loss.status =
        plugin().comm_failure(comm_, error, sizeof error, &loss.rank, &loss.pid, cause, sizeof cause);
    loss.error = error;
    loss.cause = cause;
    return loss;
  }

 private:
  comm::testing::KvSpace space_;
  const int rank_, size_;
  const cuda::PrimaryContext* gpu_ = nullptr;
  cuda::OwnedStream stream_;
  lockstep_comm* comm_ = nullptr;
  lockstep_status status_ = LOCKSTEP_OK;
  std::string error_;
};

inline void on_ranks(int size, const NcclRank::Options& options, const std::function<void(NcclRank&)>& body) {
  comm::testing::MapKv kv;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      NcclRank rank(kv, r, size, options);
      body(rank);
    });
  }
  for (auto& each : threads) each.join();
}
// Communicators must exist.
inline void on_ranks(int size, const std::function<void(NcclRank&)>& body) {
  on_ranks(size, {}, [&](NcclRank& rank) {
    ASSERT_EQ(rank.status(), LOCKSTEP_OK) << rank.error();
    body(rank);
  });
}

}  // namespace lockstep::nccl_plugin
