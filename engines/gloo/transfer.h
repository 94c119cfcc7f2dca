// A piece of memory that one operation sends from or receives into, over gloo. Waiting ends when the bytes
// have moved, or when the group breaks, which wakes every transfer of it.
//
// Ownership: a Transfer must not outlive its StopSource and Connections. Once it is gone gloo does not touch
// the memory any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

#include "engines/gloo/connections.h"
#include "engines/gloo/failure.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

// Why the operations of one communicator must stop, and the transfers to wake when that happens. The first
// reason stays. Thread safety: all methods, any thread.
class StopSource {
 public:
  // The first call counts and wakes all; returns whether this was it.
  bool break_with(Failure failure);
  // As break_with, for a rank that leaves in order: operations fail with it, failure() stays empty.
  bool close(Failure failure);
  std::optional<Failure> failure() const;
  // Why operations cannot go on: a failure, or that this rank has left.
  std::optional<Failure> stop() const;
  // Raises it when there is one.
  void check() const;

 private:
  friend class Transfer;
  void enter(gloo::transport::UnboundBuffer* buffer);
  void leave(gloo::transport::UnboundBuffer* buffer);
  bool stop_with(Failure failure, bool failed);

  mutable base::Mutex mutex_;
  std::optional<Failure> stop_ LOCKSTEP_GUARDED_BY(mutex_);
  bool failed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::unordered_set<gloo::transport::UnboundBuffer*> buffers_ LOCKSTEP_GUARDED_BY(mutex_);
};

// A pair has failed under an operation: why is found out by whoever catches it.
struct PairFailed {
  int peer;  // -1: not known
  std::string message;
};

class Transfer {
 public:
  // Raises the stop_source's failure when there is one.
  Transfer(StopSource& stop_source, Connections& connections, const void* memory, std::size_t n_bytes);
  ~Transfer();
  Transfer(const Transfer&) = delete;

  // These only start. Raise PairFailed.
  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t n_bytes);
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t n_bytes);
  void recv_from_any(int size, int but, std::uint64_t slot);
  // Wait for one send or receive that was started. Raise the stop_source's failure (Error) or PairFailed.
  void wait_send(int to);
  int wait_recv(int from);

 private:
  StopSource& stop_source_;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
};

}  // namespace lockstep::gloo_plugin
