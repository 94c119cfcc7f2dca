// What the workers of a job meet through: the secret, and the rendezvous store that asks for it. Held by whoever starts the
// workers (the launcher, spawn); the workers are the store's clients.
//
// Two steps, because the server has a thread and a process with threads must not fork workers: open() first,
// start the workers, then serve(). A worker that connects in between waits in the socket's queue.
//
// Thread safety: none. Ownership: the store ends with this object.
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

namespace lockstep {

// Under this key of the rendezvous store lies how a rank ended, in the words of describe_wait_status() and, when it had
// lost a peer itself, with its error: from the moment its starter knows and before any other rank is stopped for it.
std::string exit_cause_key(int rank);

struct JobServerOptions {
  // Loopback keeps the store on this host; anything else listens on all interfaces.
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;  // 0: a free one
  // The job has several starters: they share the secret of LOCKSTEP_SECRET_FILE instead of a fresh one.
  bool shared = false;
  bool holds_store = true;  // false: another starter does
};

class JobServer {
 public:
  // Finds the secret and binds the port; no thread yet. Raises DistNetworkError when the port is taken, kUsage with
  // the line that makes a secret file when one is needed and missing.
  static JobServer open(const JobServerOptions& options = {});
  JobServer(JobServer&&) noexcept = default;
  JobServer& operator=(JobServer&&) noexcept = default;

  // Starts the server, when the store is ours. Raises what TcpStore::open raises.
  void serve();

  // For the workers' environment; its descriptor lives as long as this object.
  JobAddress address() const;
  // Bound and listening until serve(); forked copies close it. -1 when there is none.
  int listen_fd() const { return listener_.get(); }

  // Tells the survivors how a rank ended. Never throws and takes seconds at most: a store that does not answer is a
  // log line.
  void publish_exit(int rank, const ChildExit& exit) noexcept;
  // A handle on the store, connected on first use. Raises DistNetworkError.
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

}  // namespace lockstep
