// What the launchers of one job on several hosts tell each other through the rendezvous store: that workers failed
// somewhere, and that a host is done. The host that holds the store stays until all are.
//
// Thread safety: none. Does nothing when the job has one host.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/process/job_host.h"

namespace lockstep::launch {

class Nodes {
 public:
  Nodes(JobHost& host, int n_nodes, int node_rank) : host_(host), n_nodes_(n_nodes), node_rank_(node_rank) {}

  // When check() is next worth calling.
  Deadline due() const { return n_nodes_ > 1 ? next_check_ : Deadline::never(); }
  // check() is worth calling within a tenth of a second, if the store is there: a failure here may be another host's.
  void hurry();
  // Why this host's workers should stop: another host's failed, or the store is gone. Blocks for seconds at most.
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

  JobHost& host_;
  const int n_nodes_;
  const int node_rank_;
  bool connected_ = false;
  bool told_ = false;
  Deadline next_check_ = Deadline::now();
};

}  // namespace lockstep::launch
