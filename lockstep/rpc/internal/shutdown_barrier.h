// How the workers of a static group leave together, those that are still there: rounds that end when every present worker
// has come to them, or is gone.
//
// Led by the present worker with the smallest name. Unlike a gathering nobody is named: workers need not agree on who is
// gone, and when the leader dies everyone turns to the next one. Coming to a round counts for those before it, since a worker
// may have been let through by a leader that is dead now. The leader pings everyone once: a worker that died unnoticed is
// noticed.
// Thread safety: any thread.
#pragma once

#include <list>
#include <map>
#include <mutex>

#include "lockstep/rpc/agent.h"

namespace lockstep::rpc::internal {

// Ends with an answer of any kind, or with kPeerLost when `worker` is not there any more.
Future<Agent::Answer> ping(Agent& agent, WorkerId worker, Milliseconds timeout);

class ShutdownBarrier final : public Service {
 public:
  explicit ShutdownBarrier(Agent& agent);

  // Comes to round `round` (1 and up) and waits for the others. Raises kTimeout at the deadline.
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
  // Of the workers that have not come to `round`: as the leader tells, and as the leader knows.
  std::string ask_missing(const WorkerInfo& leader, std::uint32_t round);
  Bytes missing(std::uint32_t round);
  // Answers those whose round is over.
  void look();

  Agent& agent_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<WorkerId, std::uint32_t> reached_;
  std::list<Waiting> waiting_;
  bool pinged_ = false;
};

}  // namespace lockstep::rpc::internal
