#include "engines/gloo/runtime.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {

// A weak_ptr: the threads end with the last communicator, so a program that does not use gloo any more has
// none of its threads.
std::shared_ptr<Runtime> Runtime::get() {
  static base::Mutex mutex;
  static std::weak_ptr<Runtime> shared;
  static pid_t owner = 0;
  const base::MutexLock lock(mutex);
  auto runtime = shared.lock();
  // A forked child has the object but none of its threads.
  if (runtime && owner != ::getpid()) {
    new std::shared_ptr<Runtime>(std::move(runtime));  // never ended: there are no threads to join
    runtime = nullptr;
  }
  if (!runtime) {
    const NoSignals none;
    runtime = std::make_shared<Runtime>();
    shared = runtime;
    owner = ::getpid();
  }
  return runtime;
}

std::shared_ptr<Device> Runtime::device(const BindAddress& address) {
  const base::MutexLock lock(mutex_);
  auto& device = devices_[address.text()];
  if (!device) {
    const NoSignals none;
    device = std::make_shared<Device>(address);
  }
  return device;
}

Device::Device(const BindAddress& address) {
  gloo::transport::tcp::attr attributes;
  attributes.iface = address.interface;
  attributes.hostname = address.address;
  try {
    device_ = gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::exception& error) {
    raise(LOCKSTEP_SYSTEM, cat("gloo cannot use ", address.interface.empty() ? "address " : "interface ",
                               address.text(), ": ", error.what()));
  }
  // Registered with gloo's own loop: ringing it makes the loop go around at once.
  bell_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (bell_ < 0) raise(LOCKSTEP_RESOURCE, "no descriptor for a gloo device");
  static_cast<gloo::transport::tcp::Device&>(*device_).registerDescriptor(bell_, EPOLLIN, this);
}

Device::~Device() {
  if (bell_ < 0) return;
  static_cast<gloo::transport::tcp::Device&>(*device_).unregisterDescriptor(bell_, this);
  device_.reset();
  ::close(bell_);
}

void Device::hurry() {
  constexpr std::int64_t kWhileMs = 5;
  until_ns_ = after_ms(kWhileMs);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(bell_, &one, sizeof one);
}

// On gloo's thread. While the bell is not read, the thread comes here again and again.
void Device::handleEvents(int) {
  if (now_ns() < until_ns_) {
    std::this_thread::sleep_for(std::chrono::microseconds(30));
    return;
  }
  std::uint64_t rung = 0;
  [[maybe_unused]] const auto n = ::read(bell_, &rung, sizeof rung);
}

}  // namespace lockstep::gloo_plugin
