#include "tests/fake_cuda/stream.h"

#include <cstdio>
#include <utility>

#include "tests/fake_cuda/driver.h"

namespace fake_cuda {
namespace {

using Clock = std::chrono::steady_clock;
thread_local bool is_host_function = false;

}  // namespace

bool in_host_function() {
  return is_host_function;
}

void run_host_function(Device& device, CUhostFn function, void* data) {
  const std::lock_guard lock(device.host_functions);
  is_host_function = true;
  function(data);
  is_host_function = false;
}

Stream::Stream(Device& device) : device_(device), thread_([this] { work(); }) {}

Stream::~Stream() {
  close();
  thread_.join();
}

void Stream::push(Task task) {
  const std::lock_guard lock(mutex_);
  if (capture_) {
    capture_->tasks.push_back(std::move(task));
    return;
  }
  task.epoch = device_.n_broken;
  queue_.push_back(std::move(task));
  ++n_pushed_;
  changed_.notify_all();
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return n_over_ == n_pushed_;
}

void Stream::drain(const char* who) {
  std::unique_lock lock(mutex_);
  const std::uint64_t until = n_pushed_;
  while (!changed_.wait_for(lock, std::chrono::seconds(5), [&] { return n_over_ >= until; })) {
    std::fprintf(stderr, "fake_cuda: %s waits for a stream of device %d; that is at: %s (%llu behind it)\n",
                 who, device_.index, doing_, static_cast<unsigned long long>(until - n_over_ - 1));
  }
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool Stream::capturing() const {
  const std::lock_guard lock(mutex_);
  return capture_ != nullptr;
}

bool Stream::begin_capture() {
  const std::lock_guard lock(mutex_);
  if (capture_) return false;
  capture_ = std::make_shared<Graph>();
  return true;
}

std::shared_ptr<Graph> Stream::end_capture() {
  const std::lock_guard lock(mutex_);
  return std::exchange(capture_, nullptr);
}

// False: the device broke or the process ends, the task is dropped.
bool Stream::wait_until_ready(const Task& task) {
  const auto dropped = [&] { return device_.n_broken != task.epoch || Driver::get().ending(); };
  // Polls as a device does, but lets others run: ranks outnumber cores. After a millisecond it sleeps.
  const auto busy_until = Clock::now() + std::chrono::milliseconds(1);
  while (!dropped()) {
    if (!task.ready || task.ready()) return true;
    if (Clock::now() < busy_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return false;
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) break;
    {
      const Task task = std::move(queue_.front());
      queue_.pop_front();
      doing_ = task.what;
      lock.unlock();
      if (wait_until_ready(task) && task.run) task.run();
    }  // what the task holds is gone before the stream counts as idle
    lock.lock();
    doing_ = "nothing";
    ++n_over_;
    changed_.notify_all();
  }
  finished_ = true;
}

}  // namespace fake_cuda
