// The job's secret and the rendezvous store that requires it. Owned by the process that starts the workers
// (the launcher, spawn); the workers are the store's clients.
//
// Two steps, because the server has a thread and a process with threads must not fork workers: open() first,
// start the workers, then serve(). A worker that connects in between waits in the socket's backlog.
//
// Thread safety: none. Ownership: the store lives as long as this object.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/detail/fd.h"
#include "lockstep/net/secret.h"
#include "lockstep/process/supervisor.h"
#include "lockstep/process/worker_environment.h"
#include "lockstep/store/store.h"

namespace lockstep::process {

// The key of the rendezvous store that holds how a rank ended: the text of describe_wait_status() and, when
// the rank had lost a peer itself, its error. Set as soon as its starter knows, before any other rank is
// stopped because of it.
std::string exit_cause_key(int rank);

struct JobServerOptions {
  // Loopback keeps the store on this host; anything else listens on all interfaces.
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;  // 0: any free port
  // The job has several starters: they share the secret of LOCKSTEP_SECRET_FILE instead of a fresh one.
  bool shared = false;
  bool holds_store = true;  // false: another starter holds it
};

class JobServer {
 public:
  // Obtains the secret and binds the port; starts no thread. Raises DistNetworkError when the port is in use,
  // kUsage with the command that creates a secret file when one is required and missing.
  static JobServer open(const JobServerOptions& options = {});
  JobServer(JobServer&&) noexcept = default;
  JobServer& operator=(JobServer&&) noexcept = default;

  // Starts the server if this process holds the store. Raises what TcpStore::open raises.
  void serve();

  // For the workers' environment; its descriptor lives as long as this object.
  JobAddress address() const;
  // Bound and listening until serve(); forked copies close it. -1 when there is none.
  int listen_fd() const { return listener_.get(); }

  // Publishes how a rank ended to the surviving ranks. Takes seconds at most: a store that does not answer is
  // only logged.
  void publish_exit(int rank, const ChildExit& exit) noexcept;
  // A handle to the store, connected on first use. Raises DistNetworkError.
  Store& store();

 private:
  JobServer() = default;

  JobServerOptions options_;
  std::optional<JobSecret> secret_;
  base::Fd secret_fd_;
  base::Fd listener_;
  std::string run_id_;
  std::unique_ptr<Store> store_;
};

}  // namespace lockstep::process
