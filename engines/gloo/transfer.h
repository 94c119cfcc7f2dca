// A piece of memory that one operation sends from or receives into, over gloo. Waiting ends when the bytes have moved,
// or when the group breaks: whoever breaks it wakes every transfer of it.
//
// Ownership: a Transfer must not outlive its Bond and Mesh. Once it is gone gloo does not touch the memory any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include "engines/gloo/failure.h"
#include "engines/gloo/mesh.h"

namespace lockstep::gloo_plugin {

// What holds the operations of one communicator together: its first failure, and who must hear of it.
// Thread safety: all methods, any thread.
class Bond {
 public:
  // The first call counts and wakes all; gives whether this was it.
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

  mutable std::mutex mutex_;  // guards what follows
  std::optional<Failure> stop_;
  bool failed_ = false;
  std::unordered_set<gloo::transport::UnboundBuffer*> buffers_;
};

// A pair has failed under an operation: why is found out by whoever catches it.
struct PairFailed {
  int peer;  // -1: not known
  std::string words;
};

class Transfer {
 public:
  // Raises the bond's failure when there is one.
  Transfer(Bond& bond, Mesh& mesh, const void* memory, std::size_t n_bytes);
  ~Transfer();
  Transfer(const Transfer&) = delete;

  // These only start. Raise PairFailed.
  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t n_bytes);
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t n_bytes);
  void recv_from_any(int size, int but, std::uint64_t slot);
  // Wait for one send or receive that was started. Raise the bond's failure (Error) or PairFailed.
  void wait_send(int to);
  int wait_recv(int from);

 private:
  Bond& bond_;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
};

}  // namespace lockstep::gloo_plugin
