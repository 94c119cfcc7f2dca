// The part of a group that its operations in flight keep alive after the caller's handle is gone: its
// identity, and the list of operations that have not completed.
//
// Ownership: the group and every unfinished Work hold the GroupState; the GroupState holds unfinished
// operations (a dropped Work must keep its buffers), which is a cycle only until they complete or close() is
// called.
// Thread safety: every method may be called from any thread. Lock order: an operation's mutex, then the
// GroupState's.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>

#include "lockstep/engine/engine.h"
#include "lockstep/group/detail/group_factory.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

class GroupState {
 public:
  virtual ~GroupState() = default;
  virtual const GroupIdentity& identity() const = 0;
  // The engine calls lockstep_op.done.
  virtual bool calls_back() const = 0;
  // A failed status as a value. `message` may be empty.
  virtual Failure failure(lockstep_status status, std::string_view message) const = 0;

  int rank() const { return identity().rank; }
  int size() const { return static_cast<int>(identity().members.ranks().size()); }
  const std::string& name() const { return identity().name; }
  GroupShared& shared() const { return *identity().shared; }
  // -1 stays -1.
  int world_rank(int group_rank) const {
    return group_rank < 0 ? -1 : identity().members.ranks()[static_cast<std::size_t>(group_rank)];
  }
  // "all_reduce #7 of group "0" (rank 1 of 4, called at train.cpp:42)".
  std::string describe(const char* name, std::uint64_t sequence, const std::source_location& where) const;

  // Keeps an operation until forget(); called when it starts and when it has completed.
  void keep(std::shared_ptr<Work::State> state);
  void forget(const Work::State* state) noexcept;
  // Releases dropped operations that have completed meanwhile. Cheap when there are none.
  void reap();

  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  // Waits for operations in flight, or aborts them, and leaves; once.
  void close(const std::string& cause);
  // `state` was started while another thread closed the group: no other thread will release it.
  void settle_late(Work::State& state);

 protected:
  virtual void abort(const std::string& reason) = 0;
  virtual void leave(const std::string& cause) = 0;

 private:
  using States = std::list<std::shared_ptr<Work::State>>;

  std::atomic<bool> closed_{false};
  std::atomic<int> n_unfinished_{0};
  std::mutex mutex_;
  States collectives_;  // guarded by mutex_; in the order started, in which they complete
  States messages_;     // guarded by mutex_; sends and receives complete in any order
};

}  // namespace lockstep::internal
