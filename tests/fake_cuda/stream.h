// A stream: a thread that executes a queue. And events, which are marks in queues.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/fake_cuda/cuda_abi.h"

namespace fake_cuda {

struct Device;

// What a stream does next: waits until `ready` (when there is one), then runs. Neither is called when the device breaks
// or the driver ends before.
struct Task {
  const char* what;
  std::function<bool()> ready;
  std::function<void()> run;
  int epoch = 0;  // Device::n_broken when it was pushed
};

// When work that was enqueued before has been executed. Shared by an event and the streams that wait for it.
struct Mark {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point when{};  // written before reached
};

struct Event {
  Device* device;
  bool timed;
  std::mutex mutex;
  std::shared_ptr<Mark> last;  // of the latest record; null before the first
};

struct Graph {
  std::vector<Task> tasks;
};

class Stream {
 public:
  explicit Stream(Device& device);
  ~Stream();  // joins; see Driver for who may
  Stream(const Stream&) = delete;

  Device& device() const { return device_; }
  void push(Task task);
  bool idle() const;
  // Waits until everything pushed so far is over. `who` is named when that takes long.
  void drain(const char* who);
  // No more work will come; the thread ends when the queue is empty.
  void close();
  bool finished() const { return finished_; }

  bool capturing() const;
  bool begin_capture();
  std::shared_ptr<Graph> end_capture();

 private:
  void work();
  bool wait_until_ready(const Task& task);

  Device& device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::uint64_t n_pushed_ = 0, n_over_ = 0;
  const char* doing_ = "nothing";
  bool closed_ = false;
  std::shared_ptr<Graph> capture_;
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

// True on the thread of a host function, which may not call the driver.
bool in_host_function();
void run_host_function(Device& device, CUhostFn function, void* data);

}  // namespace fake_cuda
