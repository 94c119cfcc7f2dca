// What an engine holds of the CUDA driver, released when it goes out of scope: the current context, streams, events,
// memory. Factories throw cuda::Error; destructors ignore failures, since a lost context fails every call.
// Thread safety: distinct objects from any threads; an object from one thread at a time unless its comment says otherwise.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "engines/cuda/driver.h"

namespace lockstep::cuda {

// A call of the driver failed. what() names the call and the driver's text.
class Error : public std::runtime_error {
 public:
  Error(const Driver& driver, Result result, const std::string& call);
  Result result() const { return result_; }

 private:
  Result result_;
};
inline void check(const Driver& driver, Result result, const char* call) {
  if (result != kSuccess) throw Error(driver, result, call);
}

// The primary context of a device, which the CUDA runtime (and so libtorch) uses too. Retained on first use and never
// released, as the runtime does: streams and memory of the program live in it. Immutable; any thread.
class PrimaryContext {
 public:
  // device: its index, as the process numbers its devices. Throws Error; std::out_of_range is not thrown, an unknown
  // index is the driver's error. The object lives for ever.
  static const PrimaryContext& of(const Driver& driver, int device);

  const Driver& driver() const { return *driver_; }
  int device() const { return device_; }
  Context context() const { return context_; }
  Uuid uuid() const { return uuid_; }
  int multiprocessors() const { return multiprocessors_; }

 private:
  PrimaryContext(const Driver& driver, int device);
  const Driver* driver_;
  int device_;
  Context context_ = nullptr;
  Uuid uuid_{};
  int multiprocessors_ = 0;
};

// Makes a context current in this thread, and restores what was current before. Cheap when it is current already.
class ContextScope {
 public:
  explicit ContextScope(const PrimaryContext& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver* driver_;
  bool pushed_ = false;
};

// For a thread of an engine, and around calls that a capture of the program's would forbid: a program that captures a
// stream in the global mode makes cuMemAlloc, cuEventQuery and others fail in every thread that has not said, as this does,
// that its calls have nothing to do with the capture.
class RelaxedCaptureScope {
 public:
  explicit RelaxedCaptureScope(const Driver& driver);
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  const Driver* driver_;
  CaptureMode mode_ = kCaptureRelaxed;
};

// Whether the stream is being captured into a graph. A stream that cannot be asked (the default stream while another one
// is captured) counts as not captured.
bool is_capturing(const Driver& driver, Stream stream);

namespace internal {
// A handle and the context it belongs to; Release is called with that context current.
template <class Handle, Result (*Driver::*Release)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const PrimaryContext& context, Handle handle) : context_(&context), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : context_(std::exchange(other.context_, nullptr)), handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      reset();
      context_ = std::exchange(other.context_, nullptr);
      handle_ = std::exchange(other.handle_, Handle{});
    }
    return *this;
  }
  ~Owned() { reset(); }

  Handle get() const { return handle_; }
  explicit operator bool() const { return context_ != nullptr; }
  void reset() {
    if (context_ == nullptr) return;
    const ContextScope scope(*context_);
    (context_->driver().*Release)(handle_);
    context_ = nullptr;
    handle_ = Handle{};
  }

 private:
  const PrimaryContext* context_ = nullptr;
  Handle handle_{};
};
}  // namespace internal

using OwnedStream = internal::Owned<Stream, &Driver::stream_destroy>;
using OwnedEvent = internal::Owned<Event, &Driver::event_destroy>;
// cuMemFree waits until the device is idle: not for a path that must not block.
using DeviceMemory = internal::Owned<DevicePtr, &Driver::mem_free>;
using OpenedIpcMemory = internal::Owned<DevicePtr, &Driver::ipc_close_mem_handle>;

enum class Priority { kLeast, kGreatest };
// A stream that does not synchronise with the default stream.
OwnedStream create_stream(const PrimaryContext& context, Priority priority);
OwnedEvent create_event(const PrimaryContext& context);  // without timing
DeviceMemory allocate(const PrimaryContext& context, std::size_t n_bytes);

// Host memory (whole pages, such as a mapped segment) that the device reads and writes where it is.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  // The memory must stay mapped while the object lives.
  RegisteredMemory(const PrimaryContext& context, void* memory, std::size_t n_bytes);
  RegisteredMemory(RegisteredMemory&& other) noexcept;
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept;
  ~RegisteredMemory() { reset(); }

  // Where the device sees a byte of the memory.
  DevicePtr address_of(const void* inside) const {
    return device_ +
           static_cast<std::size_t>(static_cast<const char*>(inside) - static_cast<const char*>(memory_));
  }
  explicit operator bool() const { return memory_ != nullptr; }
  void reset();

 private:
  const PrimaryContext* context_ = nullptr;
  void* memory_ = nullptr;
  DevicePtr device_ = 0;
};

}  // namespace lockstep::cuda
