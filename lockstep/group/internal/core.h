// The part of an engine's group that operations in flight and shared tensors keep alive after the caller's handle is
// gone: the communicator, what it borrows, and the list of operations that are not over.
//
// Ownership: the group, every unfinished Work and every shared tensor hold the Core; the Core holds unfinished
// operations (a dropped Work must keep its buffers), which is a cycle only until they end or close() is called.
// Thread safety: every method may be called from any thread. Lock order: an operation's mutex, then the Core's.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>

#include "lockstep/engine/engine.h"
#include "lockstep/group/internal/group_base.h"
#include "lockstep/group/internal/store_host.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

class Core final {
 public:
  // Joins the group: blocks until all ranks have, or raises.
  explicit Core(JoinOptions options);

  int rank() const { return options_.place.rank; }
  int size() const { return static_cast<int>(options_.place.members.ranks().size()); }
  const std::string& name() const { return options_.place.name; }
  GroupShared& shared() const { return *options_.place.shared; }
  const comm::Engine& engine() const { return *options_.engine; }
  comm::Communicator& comm() { return *comm_; }
  const std::shared_ptr<comm::Communicator>& shared_comm() const { return comm_; }

  // "all_reduce #7 of group "0" (rank 1 of 4, called at train.cpp:42)".
  std::string describe(const char* name, std::uint64_t sequence, const std::source_location& where) const;

  // Keeps an operation until forget(); called when it starts and when it is over.
  void keep(std::shared_ptr<Work::State> state);
  void forget(const Work::State* state) noexcept;
  // Lets go of dropped operations that have ended meanwhile. Cheap when there are none.
  void reap();

  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  void close(const std::string& cause);

 private:
  std::shared_ptr<comm::Communicator> join() const;

  JoinOptions options_;                             // constant after construction
  const std::unique_ptr<StoreHost> host_;           // before comm_, which borrows it
  const std::shared_ptr<comm::Communicator> comm_;  // synchronised by itself
  std::atomic<bool> closed_{false};
  std::atomic<int> n_unfinished_{0};
  std::mutex mutex_;
  std::list<std::shared_ptr<Work::State>> unfinished_;  // guarded by mutex_; in the order started
};

}  // namespace lockstep::internal
