// One rank's HostPeers and the threads that serve all communicators built on it: a worker that drives posted operations
// nobody waits for, and a watch over the other processes. A thousand communicators share them.
//
// Threads: "ls-progress", started when something is first posted; "ls-peer-watch", when there are other processes. The destructor
// joins both. Thread safety: every method may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/local/death_watch.h"

namespace lockstep::comm::internal {

// What the threads need of a communicator.
class Served {
 public:
  enum class State : std::uint8_t {
    kIdle,       // nothing is posted
    kElsewhere,  // another thread drives it and will wake the worker when it stops
    kStuck,      // others must move first
  };
  // Drives posted operations as far as they go. On the last look before the worker sleeps it also ends what must be
  // ended, and lowers `until` to the next deadline. Called by the worker.
  virtual State serve(bool last_look, Deadline& until) = 0;
  // Something is posted.
  virtual bool busy() const = 0;
  // The process of a rank of HostPeers has ended. Called by the watch.
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

  // From now on losses are told, those that were before at once. remove() returns when no thread of the progress service is inside the communicator any more.
  void add(Served& served);
  void remove(Served& served);
  // How the process of a rank was lost; nothing while it lives.
  std::optional<std::string> loss_of(int host_rank);
  // Starts the worker, if none runs yet. Raises when the system has no thread for it.
  void start();
  // The worker drives it until it is idle. Pre: start() was called.
  void engage(Served& served);
  // The worker, and threads that wait in any communicator of this rank, look again.
  void wake();
  // Takes over what a communicator leaves behind in the arena, until the others have let go of it.
  void retire(std::unique_ptr<CommMembers> members);

 private:
  explicit ProgressService(std::unique_ptr<HostPeers> host_peers);
  void work();
  // One pass over all engaged communicators; true when one is stuck.
  bool pass(bool last_look, Deadline& until);
  void drop_idle();
  void tell_loss(int host_rank, local::DeathWatch::Loss loss);

  const std::unique_ptr<HostPeers> host_peers_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::vector<Served*> served_;
  std::vector<Served*> engaged_;  // null where one was removed during a pass
  Served* serving_ = nullptr;     // the worker is inside it
  bool stopping_ = false;
  std::vector<std::unique_ptr<CommMembers>> retired_;

  std::mutex telling_;                             // held while losses are told; remove() waits for it
  std::vector<std::pair<int, std::string>> lost_;  // guarded by telling_: (rank of HostPeers, cause)
  base::Thread worker_;                            // guarded by mutex_ until started
  std::atomic<bool> started_{false};
  std::atomic<int> n_lost_{0};  // ranks in lost_, or about to be
  std::unique_ptr<local::DeathWatch> watch_;
};

}  // namespace lockstep::comm::internal
