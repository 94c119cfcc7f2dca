// What the launchers of one job on several hosts tell each other through the rendezvous store: that they fit together,
// that workers failed somewhere, and that a host is done. The host that holds the store stays until all are.
//
// Thread safety: none. Does nothing when the job has one host.
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
  Nodes(JobServer& host, const RunPlan& plan)
      : host_(host), n_nodes_(plan.n_nodes), node_rank_(plan.node_rank), n_workers_(plan.n_workers) {}

  // When check() is next worth calling.
  Deadline due() const { return n_nodes_ > 1 ? next_check_ : Deadline::never(); }
  // check() is worth calling within a tenth of a second, if the store is there: a failure here may be another host's.
  void hurry();
  // Why this host's workers should stop: another host's failed, the store is gone, or another launcher has this one's
  // number or runs another number of workers (the others are told so too). Blocks for seconds at most.
  std::optional<std::string> check();
  // This host's workers failed: tells the others. Never throws.
  void tell_failure(const std::string& what) noexcept;
  // This host is done. The store's host waits for the others, five minutes at most: for all of them when the job went
  // well here, else for those that have come. Never throws.
  void end(bool well) noexcept;

 private:
  // The store, where every launcher that has connected says so.
  Store& store();
  std::vector<std::string> awaited_keys(bool well);
  // Why this launcher and those that came before it cannot be one job.
  std::optional<std::string> misfit();

  JobServer& host_;
  const int n_nodes_;
  const int node_rank_;
  const int n_workers_;
  bool connected_ = false;
  bool compared_ = false;      // with host 0, which may not have come yet
  std::string came_as_;        // what this launcher says of itself under its number
  std::string first_came_as_;  // what the first launcher under that number says
  bool told_ = false;
  Deadline next_check_ = Deadline::now();
};

}  // namespace lockstep::launch
