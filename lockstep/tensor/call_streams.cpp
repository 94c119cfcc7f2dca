#include "lockstep/tensor/internal/call_streams.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "lockstep/tensor/detail/device_stream.h"
#include "lockstep/tensor/internal/device_copies.h"

namespace lockstep::internal {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

thread_local CallStreams* streams_here = nullptr;

// GPUs whose tensors this process has sent or received, one bit each. Others have no context here, and recording an
// event would create one.
std::atomic<std::uint64_t> followed{0};
constexpr int kMostDevices = 64;

class Events final : public object::DeviceEvents {
 public:
  Events(std::uint64_t devices, std::vector<WeakStorage> made) : made_(std::move(made)) {
    for (int i = 0; i < kMostDevices; ++i) {
      if ((devices >> i & 1) == 0) continue;
      const auto stream = current_stream({c10::kCUDA, static_cast<c10::DeviceIndex>(i)});
      marks_.push_back({.stream = stream, .event = c10::Event(c10::kCUDA)});
      marks_.back().event.record(stream);
    }
  }

  void order() override {
    for (const auto& mark : marks_) {
      const auto now = current_stream(mark.stream.device());
      if (now == mark.stream) continue;
      mark.event.block(now);
      const std::lock_guard lock(mutex_);
      if (std::ranges::find(users_, now) == users_.end()) users_.push_back(now);
    }
    for (const auto& weak : made_) {
      const auto storage = weak.lock();
      if (!storage) continue;
      const c10::impl::VirtualGuardImpl guard(storage->device_type());
      guard.recordDataPtrOnStream(storage->data_ptr(), current_stream(storage->device()));
    }
  }

  // The streams that made the value wait for those that used it: freed memory goes back to the former.
  void before_release() noexcept override {
    try {
      const std::lock_guard lock(mutex_);
      for (const auto& user : users_) {
        for (const auto& mark : marks_) {
          if (mark.stream.device() == user.device()) lockstep::internal::order(user, mark.stream);
        }
      }
    } catch (...) {  // the device is lost, or the process ends: nothing runs there any more
    }
  }

 private:
  struct Mark {
    c10::Stream stream;
    c10::Event event;
  };
  std::vector<Mark> marks_;  // constant after construction
  const std::vector<WeakStorage> made_;
  std::mutex mutex_;
  std::vector<c10::Stream> users_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<object::DeviceEvents> record_events() {
  return std::make_shared<Events>(followed.load(std::memory_order_relaxed),
                                  streams_here == nullptr ? std::vector<WeakStorage>() : streams_here->made_);
}

// The bit first: a thread that finds the recorder records for this device.
void follow_device(c10::Device device) {
  const auto bit = std::uint64_t{1} << (device.index() % kMostDevices);
  if ((followed.load(std::memory_order_relaxed) & bit) != 0) return;
  followed.fetch_or(bit);
  object::set_device_event_recorder(record_events);
}

CallStreams::CallStreams() : outer_(streams_here) {
  streams_here = this;
}

// In reverse: the first of a device is the thread's own.
CallStreams::~CallStreams() {
  streams_here = outer_;
  for (auto stream = before_.rbegin(); stream != before_.rend(); ++stream)
    c10::impl::VirtualGuardImpl(stream->device_type()).exchangeStream(*stream);
}

CallStreams& CallStreams::of(object::DeviceTransit& transit) {
  if (!transit.streams) transit.streams = std::make_shared<CallStreams>();
  return *static_cast<CallStreams*>(transit.streams.get());
}

void CallStreams::enter(c10::Device device) {
  const auto entered = [&](const c10::Stream& stream) { return stream.device() == device; };
  if (std::ranges::any_of(before_, entered)) return;
  follow_device(device);
  const auto stream = pool_stream(device);
  before_.reserve(before_.size() + 1);  // so that what was exchanged is remembered
  before_.push_back(c10::impl::VirtualGuardImpl(device.type()).exchangeStream(stream));
}

// Through pinned memory: the bytes of the message are free again when this returns, whatever the device does.
at::Tensor CallStreams::place(const at::Tensor& host, c10::Device device) {
  enter(device);
  at::Tensor staged = host_memory(host.sizes(), host.strides(), host.scalar_type());
  staged.copy_(host);
  at::Tensor tensor =
      at::empty_strided(host.sizes(), host.strides(), host.options().device(device).pinned_memory(false));
  tensor.copy_(staged, /*non_blocking=*/staged.is_pinned());
  note(tensor);
  return tensor;
}

void CallStreams::note(const at::Tensor& tensor) {
  if (tensor.has_storage()) made_.push_back(tensor.storage().getWeakStorageImpl());
}

}  // namespace lockstep::internal
