// What all communicators of a process share: threads for operations, the watch, and gloo's devices (each a
// thread of gloo's that moves the bytes). There while there is a communicator; the last one to go ends them.
#pragma once

#include <gloo/transport/tcp/device.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "engines/gloo/address.h"
#include "engines/gloo/pool.h"
#include "engines/gloo/signals.h"
#include "engines/gloo/watch.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

// A gloo device. gloo waits for its thread to go once around whenever it opens or closes a connection, and an
// idle one takes 10 ms for that; hurry makes it go around quickly for a while.
class Device final : private gloo::transport::tcp::Handler {
 public:
  // Raises Error when gloo cannot bind there.
  explicit Device(const BindAddress& address);
  ~Device() override;
  Device(const Device&) = delete;

  const std::shared_ptr<gloo::transport::Device>& gloo_device() const { return device_; }
  void hurry();

 private:
  void handleEvents(int events) override;

  std::shared_ptr<gloo::transport::Device> device_;
  int bell_ = -1;
  std::atomic<std::int64_t> until_ns_{0};
};

class Runtime {
 public:
  // A forked child gets one of its own: its parent's threads are not there.
  static std::shared_ptr<Runtime> get();

  // Raises Error as Device.
  std::shared_ptr<Device> device(const BindAddress& address);

  Pool pool;
  Watch watch;

 private:
  base::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Device>> devices_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::gloo_plugin
