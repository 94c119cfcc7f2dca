// How ranks find each other: a URL and the environment become a store, a rank and a world size.
//
//   env://                    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or what detect_cluster() finds;
//                             when nothing is set, a world of one and (once per process) a warning that
//                             names the launcher
//   tcp://host:port?rank=&world_size=   rank 0 listens there
//   file:///path?rank=&world_size=      a file on a shared disk
//   anything registered with register_rendezvous_handler
//
// rank and world_size come from the URL or from the arguments, each from one of them only. Text in a URL is
// taken literally. Rank 0 listens on loopback when the address is loopback, else on all interfaces, and then
// only with a job secret (LOCKSTEP_SECRET_FILE) or LOCKSTEP_INSECURE=1. With
// TORCHELASTIC_USE_AGENT_STORE=True the launcher hosts the store and every rank is its client. A second call
// opens a second store: nothing is cached.
//
// Thread safety: all functions may be called from any thread.
// Blocking: rendezvous() waits for the store up to the timeout.
// Errors: kUsage naming the missing variable or argument, or a timeout that is not positive; DistNetworkError
// naming the address.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/store/store.h"

namespace lockstep {

struct RendezvousOptions {
  std::string init_method = "env://";
  std::optional<int> rank{};                    // unset: from the URL or the environment
  std::optional<int> world_size{};              // likewise
  Milliseconds timeout = kDefaultStoreTimeout;  // of meeting, and then the store's; kNoTimeout: none
  // Ranks join and leave at any time: nothing waits for a number of them, and a rank need not be given,
  // except for 0, which hosts the store.
  bool open_ended = false;
};

struct RendezvousResult {
  std::shared_ptr<Store> store;  // null in a world of one that asked for no address
  // Unset only when the options are open_ended: a rank that was not given, and the size always.
  std::optional<int> rank = 0;
  std::optional<int> world_size = 1;
};

RendezvousResult rendezvous(const RendezvousOptions& options = {});

// Adds a URL scheme ("etcd") to this process. Raises kUsage when the scheme exists. The handler gets the
// options as they were given; it may block up to their timeout, and may call rendezvous() itself.
using RendezvousHandler = std::function<RendezvousResult(const RendezvousOptions&)>;
void register_rendezvous_handler(const std::string& scheme, RendezvousHandler handler);

// What the environment says about this process's rank and its peers, and which launcher set it. What is not
// given is unset, the address empty.
struct Cluster {
  std::string source = "none";  // "torchrun", "PET", "Open MPI", "PMI", "PMIx", "Slurm", "none"
  std::optional<int> rank{}, world_size{};
  std::optional<int> local_rank{}, local_world_size{};
  std::optional<int> node_rank{}, n_nodes{};
  std::string master_addr{};
  std::optional<int> master_port{};
  bool agent_store = false;  // the launcher hosts the store; every rank is a client
  std::string details{};     // one line for humans: which variables it came from
};

// Looks at torchrun's variables, then PET_*, Open MPI, PMI and PMIx, Slurm; the first that gives a rank wins,
// and a line at info level says what was found and where. MASTER_ADDR and MASTER_PORT always win over what
// follows: under MPI and Slurm, ranks of one host get 127.0.0.1 and a port derived from the job's number;
// under Slurm across hosts the first host of the list hosts the store; under MPI across hosts the address
// stays empty.
// Raises kUsage naming the variable when one is malformed or half of a pair is missing.
Cluster detect_cluster();

}  // namespace lockstep
