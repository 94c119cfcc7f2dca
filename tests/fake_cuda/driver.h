// The state of the fake driver: devices, and the registries behind the handles it gives out.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_cuda/memory.h"
#include "tests/fake_cuda/stream.h"

namespace fake_cuda {

// A device and its primary context; the CUcontext is the Device's address.
struct Device {
  int index = 0;
  std::atomic<int> error{kSuccess};  // sticky
  std::atomic<int> n_broken{0};      // how often it broke: work that was enqueued before is dropped
  std::atomic<int> n_retained{0};
  std::mutex host_functions;  // held while one runs
  std::shared_ptr<Stream> null_stream;
};

struct Kernel {
  fake_cuda_kernel run = nullptr;
  std::vector<std::size_t> sizes;
};

struct Function {
  std::string name;
  Kernel kernel;
  std::atomic<bool> loaded{false};
};

struct Module {
  std::map<std::string, std::unique_ptr<Function>> functions;
};

class Driver {
 public:
  // Made with the first use, never destroyed: the program's threads may call until the process is gone.
  static Driver& get();

  // First line of an entry: may it be called, and shall it fail?
  CUresult enter(const char* name);
  CUresult initialize();

  int n_devices() const { return static_cast<int>(devices_.size()); }
  Device* device(int index);
  // The device of the calling thread's current context, or null; with its error.
  Device* current(CUresult& error);
  // A live stream; null is the current device's null stream.
  std::shared_ptr<Stream> stream(CUstream handle, CUresult& error);
  CUstream add_stream(Device& device);
  CUresult remove_stream(CUstream handle);
  void drain(Device& device, const char* who);
  // As drain, for calls that block only because the real driver does.
  void block_as_the_real_one(Device& device, const char* who) {
    if (!relaxed_) drain(device, who);
  }
  // The driver ends with the process: streams drop what they have.
  bool ending() const { return ending_; }
  void end();

  Memory memory;

  std::mutex mutex;  // guards what follows
  std::map<void*, std::shared_ptr<Event>> events;
  std::map<void*, std::shared_ptr<Module>> modules;
  std::map<void*, std::shared_ptr<Graph>> graphs;
  std::map<std::string, Kernel> kernels;

  std::optional<Kernel> find_kernel(const std::string& name);
  void fail(const std::string& entry, int nth, int result);
  std::uint64_t calls(const std::string& entry);

 private:
  Driver();
  void read_environment();

  std::vector<std::unique_ptr<Device>> devices_;
  std::atomic<int> owner_{0};  // the process that called cuInit; others were forked from it
  std::atomic<bool> ending_{false};
  bool relaxed_ = false;
  void* kernels_library_ = nullptr;

  std::mutex streams_mutex_;
  std::map<void*, std::shared_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Stream>> closed_;  // until their threads have ended

  struct Counts {
    std::uint64_t n_calls = 0;
    std::map<std::uint64_t, int> failures;  // by number of call
  };
  std::mutex counts_mutex_;
  std::map<std::string, Counts> counts_;
};

// The calling thread's stack of contexts.
std::vector<Device*>& contexts();

}  // namespace fake_cuda
