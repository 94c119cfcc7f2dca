// One rank's HostPeers and the threads that serve all communicators built on it: a worker that drives posted
// operations that no thread waits for, and a watch over the other processes. A thousand communicators share
// them.
//
// Locks. telling_, then mutex_. The worker holds neither while it is inside a communicator; the watch holds
// telling_ while it notifies communicators of a loss, so remove() returns only when no notification is in
// progress. A communicator may take its own lock in any call made from here except busy(), which is called
// under mutex_.
//
// Threads: "ls-progress", started when something is first posted; "ls-peer-watch", when there are other
// processes. The destructor joins both. Thread safety: every method may be called from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/local/death_watch.h"

namespace lockstep::comm::internal {

// What the threads need of a communicator.
class Served {
 public:
  enum class State : std::uint8_t {
    kIdle,       // nothing is posted
    kElsewhere,  // another thread drives it and wakes the worker when it stops
    kStuck,      // other ranks must move first
  };
  // Advances posted operations as far as possible. On the last call before the worker sleeps it also ends
  // what is late, and lowers `until` to the next deadline. Called by the worker.
  virtual State serve(bool last_look, Deadline& until) = 0;
  // Something is posted.
  virtual bool busy() const = 0;
  // The process of a rank of HostPeers has ended. Called by the watch, and by add().
  virtual void lost(int host_rank, const std::string& cause) = 0;
  // Still needs that rank, which has not left in order.
  virtual bool needs(int host_rank) = 0;
  virtual std::string cause_of_loss(int host_rank) = 0;

 protected:
  ~Served() = default;
};

class ProgressService {
 public:
  // Collective: raises as HostPeers::join.
  static std::shared_ptr<ProgressService> join(const lockstep_comm_config& config);
  ~ProgressService();
  ProgressService(const ProgressService&) = delete;

  HostPeers& host_peers() { return *host_peers_; }

  // From now on the communicator is notified of losses, immediately of those that happened before. remove()
  // returns when no thread of the service is inside the communicator any more.
  void add(Served& served);
  void remove(Served& served);
  // How the process of a rank was lost; nothing while it lives. May wait until the cause of a loss is known
  // (300 ms).
  std::optional<std::string> loss_of(int host_rank);
  // Starts the worker, if none runs yet. Raises when the system has no thread for it.
  void start();
  // The worker drives it until it is idle. Pre: start() was called.
  void engage(Served& served);
  // The worker, and threads that wait in any communicator of this rank, check again.
  void wake();
  // Takes over what a communicator leaves behind in the arena, until the others have released it.
  void retire(std::unique_ptr<CommMembers> members);

 private:
  explicit ProgressService(std::unique_ptr<HostPeers> host_peers);
  void work();
  // One pass over all engaged communicators; true when one is stuck.
  bool pass(bool last_look, Deadline& until);
  void drop_idle();
  void tell_loss(int host_rank, local::DeathWatch::Loss loss);

  const std::unique_ptr<HostPeers> host_peers_;

  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::vector<Served*> served_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Served*> engaged_ LOCKSTEP_GUARDED_BY(mutex_);  // null where one was removed during a pass
  Served* serving_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;     // the worker is inside it
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<CommMembers>> retired_ LOCKSTEP_GUARDED_BY(mutex_);
  base::Thread worker_ LOCKSTEP_GUARDED_BY(mutex_);

  base::Mutex telling_;  // held while communicators are notified; remove() waits for it
  // (rank of HostPeers, cause)
  std::vector<std::pair<int, std::string>> lost_ LOCKSTEP_GUARDED_BY(telling_);
  std::atomic<bool> started_{false};
  std::atomic<int> n_lost_{0};  // ranks in lost_, or about to be
  std::unique_ptr<local::DeathWatch> watch_;
};

}  // namespace lockstep::comm::internal
