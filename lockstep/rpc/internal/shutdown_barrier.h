// A barrier for shutdown that survives the loss of workers, its leader included: the rounds in which the
// workers of a static group leave together. A round ends when every worker that is still present has entered
// it.
//
// Led by the present worker with the smallest name. Unlike all_gather it names no participants: workers need
// not agree on who is gone, and when the leader dies everyone turns to the next one. Entering a round counts
// for all before it, since a worker may have been released from those by a leader that is dead now. The
// leader pings everyone once, so that a death that nobody has noticed is noticed.
// Thread safety: any thread.
#pragma once

#include <list>
#include <map>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/rpc/agent.h"

namespace lockstep::rpc::internal {

// Ends with an answer of any kind, or with kPeerLost when `worker` is not there any more.
Future<Agent::Answer> ping(Agent& agent, WorkerId worker, Milliseconds timeout);

class ShutdownBarrier final : public Service {
 public:
  explicit ShutdownBarrier(Agent& agent);

  // Enters round `round` (1 and up) and blocks until the others have. Raises kTimeout at the deadline.
  void meet(std::uint32_t round, Deadline deadline);

  void on_lost(WorkerId peer, const std::string& cause) override;
  void debug_info(std::map<std::string, std::string>& info) override;
  void on_close() override;
  void on_closed() override { on_close(); }

 private:
  struct Waiting {
    std::uint32_t round;
    Request request;
  };
  void take(Request request);
  void ping_all();
  // Which workers have not entered `round`: asked of the leader, and the leader's answer.
  std::string ask_missing(const WorkerInfo& leader, std::uint32_t round);
  Bytes missing(std::uint32_t round);
  // Answers those whose round is over. Called when a worker has entered a round, and when one is lost.
  void look();

  Agent& agent_;
  base::Mutex mutex_;
  std::map<WorkerId, std::uint32_t> reached_ LOCKSTEP_GUARDED_BY(mutex_);  // the last round each has entered
  std::list<Waiting> waiting_ LOCKSTEP_GUARDED_BY(mutex_);
  bool pinged_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep::rpc::internal
