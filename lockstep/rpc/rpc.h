// Remote procedure calls between the workers of a job.
//
//   double norm(const std::vector<double>& v);
//   LOCKSTEP_RPC_FUNCTION(norm);                    // callable from every worker
//
//   rpc::start();                                   // env://, as the launcher sets it: "worker<rank>"
//   double n = rpc::rpc_sync("worker1", norm, {{3.0, 4.0}});
//   auto trainer = rpc::remote<Trainer>("worker2", rpc::Args{3});  // lives there; an RRef here
//   rpc::shutdown();                                // waits for all workers
//
// start() provides calls and RRefs, without libtorch. Programs with tensors call lockstep::init_rpc
// (remote/init_rpc.h), which adds distributed autograd, operators, modules and optimizers.
//
//   call.h      rpc_sync, rpc_async, WaitAll         function.h  what can be called
//   rref.h      values that stay where they are      future.h    results that are on their way
//   gather.h    barrier, all_gather                  agent.h     for layers above
//
// One agent per process, or per rank thread inside run_threads. On one host messages go through shared
// memory, across hosts over TCP; connections prove that they know the job's secret (docs/rpc.md). A child
// that the program forks has no RPC (calls raise kUsage) and does not affect its parent's, even when it
// leaves through exit(); it may start its own.
// Thread safety: everything may be called from any thread, start and shutdown by one.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/device_map.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/profile.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/rpc/worker.h"
#include "lockstep/store/store.h"

namespace lockstep::rpc {

enum class Membership : std::uint8_t {
  kStatic,   // a fixed number of workers, which start and leave together
  kDynamic,  // workers join and leave at any time
};

struct RpcOptions {
  int num_worker_threads = 16;       // that run at once
  Milliseconds rpc_timeout{60'000};  // of calls that give none; kNoTimeout: none
  std::string init_method{};         // "" means env://, unless store is given
  Membership membership = Membership::kStatic;
  std::optional<int>
      rank{};  // unset: from the URL or the environment; in a dynamic group also the next free number. Rank 0
               // hosts the store of tcp:// and env://, and must be the last to leave
  std::optional<int> world_size{};     // unset: from the URL or the environment. Not of a dynamic group
  std::shared_ptr<Store> store{};      // instead of init_method
  Milliseconds init_timeout{300'000};  // of waiting for the others; kNoTimeout: none
  DeviceMaps device_maps{};            // for tensors on GPUs, by the worker that is called (device_map.h)
  std::vector<int> devices{};          // GPUs that maps of this worker and of others may name; empty: any
  std::string backend = "host";        // or one of register_rpc_backend
  bool tcp_only = false;               // TCP between workers of one host too
  std::string bind_host{};         // where workers of other hosts reach this one; "": the address from which
                                   // it reaches the TCP store, else MASTER_ADDR
  bool strict_rref_check = false;  // shutdown raises when RRefs were leaked, instead of a warning
  std::vector<Extension>
      extensions{};  // layers above RPC; lockstep::init_rpc (remote/init_rpc.h) gives all there are

  // As torch's set_device_map: adds to the map of `worker`. Raises kUsage when it is not one to one any more.
  void set_device_map(const std::string& worker, const DeviceMap& map);
};

// Makes this process a worker. `name` is unique in the group: letters, digits, "_", ":" and "-", fewer than
// 128. Static group (a world size): returns when all workers have joined and know each other. Dynamic group:
// when those that have joined know of this one. Raises kUsage for a bad or taken name, bad options, and when
// it was called before; kTimeout naming who has not arrived.
void start(const std::string& name, RpcOptions options = {});
// As worker<rank>, by the rank that options, URL or environment give, or in a dynamic group the number it
// gets.
void start(RpcOptions options = {});

struct ShutdownOptions {
  bool graceful = true;               // false: at once, for this worker only; the others see it go
  Milliseconds timeout = kNoTimeout;  // of waiting for the others
};
// Graceful: waits until every worker has called it and has no call in flight, releases RRefs, and leaves; in
// a dynamic group only this worker's calls are waited for. Workers that are gone are not waited for. Later
// calls raise kUsage: not initialised. Raises kUsage in a function that runs for a caller; kTimeout (this
// worker has left nevertheless); for leaked RRefs see strict_rref_check.
void shutdown(ShutdownOptions options = {});

bool is_initialized() noexcept;
// "": this worker.
WorkerInfo get_worker_info(const std::string& name = "");
std::vector<WorkerInfo> get_worker_infos();
Milliseconds get_rpc_timeout();
// Raises kUsage unless it is positive; kNoTimeout: calls that give no timeout have none.
void set_rpc_timeout(Milliseconds timeout);
// Counters by name, for debugging: agent.* of calls and threads, num_owner_rrefs and its like of RRefs,
// num_autograd_contexts and num_current_backward_passes.
std::map<std::string, std::string> get_debug_info();
// The maps given in RpcOptions.
DeviceMaps get_device_maps();

// Another way to carry messages, chosen by RpcOptions::backend. Raises kUsage when the name is taken.
struct BackendRequest {
  WorkerInfo self{};
  const RpcOptions* options = nullptr;
};
using MakeTransport = std::function<std::unique_ptr<transport::Transport>(const BackendRequest&)>;
void register_rpc_backend(const std::string& name, MakeTransport make);
bool is_rpc_backend_available(const std::string& name);

}  // namespace lockstep::rpc
