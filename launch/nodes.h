// Coordination of one job's launchers on several hosts through the rendezvous store: consistency of their
// options, worker failures, and completion. The host that holds the store waits until all are done.
//
// Thread safety: none. A no-op when the job has one host.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/run_options.h"
#include "lockstep/base/deadline.h"
#include "lockstep/process/job_server.h"

namespace lockstep::launch {

class Nodes {
 public:
  Nodes(process::JobServer& host, const RunPlan& plan)
      : host_(host), n_nodes_(plan.n_nodes), node_rank_(plan.node_rank), n_workers_(plan.n_workers) {}

  // When to call check() next.
  Deadline due() const { return n_nodes_ > 1 ? next_check_ : Deadline::never(); }
  // Makes check() due within a tenth of a second, if the store is reachable: a failure here may be caused by
  // another host's.
  void hurry();
  // Why this host's workers must stop: another host's failed, the store is lost, or another launcher has the
  // same node rank or runs a different number of workers (the others are notified too). Blocks for seconds at
  // most.
  std::optional<std::string> check();
  // Notifies the other hosts that this host's workers failed.
  void tell_failure(const std::string& what) noexcept;
  // This host is done. The host of the store waits for the others, five minutes at most: for all of them when
  // the job succeeded here, otherwise for those that have connected.
  void end(bool well) noexcept;

 private:
  // The store; connecting registers this launcher there.
  Store& store();
  std::vector<std::string> awaited_keys(bool well);
  // Why this launcher is inconsistent with those that connected earlier.
  std::optional<std::string> misfit();

  process::JobServer& host_;
  const int n_nodes_;
  const int node_rank_;
  const int n_workers_;
  bool connected_ = false;
  bool compared_ = false;      // with host 0, which may not have connected yet
  std::string came_as_;        // this launcher's entry under its node rank
  std::string first_came_as_;  // the entry of the first launcher under that node rank
  bool told_ = false;
  Deadline next_check_ = Deadline::now();
};

}  // namespace lockstep::launch
