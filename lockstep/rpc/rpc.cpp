#include "lockstep/rpc/rpc.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <thread>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/net/address.h"
#include "lockstep/rendezvous/rendezvous.h"
#include "lockstep/rpc/current.h"
#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/internal/device_plan.h"
#include "lockstep/rpc/internal/membership.h"
#include "lockstep/rpc/internal/shutdown_barrier.h"
#include "lockstep/store/prefix_store.h"
#include "lockstep/store/tcp_store.h"
#include "lockstep/transport/worker_transport.h"

namespace lockstep::rpc {
namespace {

// What shutdown needs to know.
struct Session {
  RpcOptions options;
  std::shared_ptr<Store> store;  // under the prefix; null in a world of one that asked for no address
  std::unique_ptr<internal::DynamicGroup> dynamic{};  // null in a static group
};

void check_name(const std::string& name) {
  const auto good = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == ':' || c == '-'; };
  if (!name.empty() && name.size() < 128 && std::ranges::all_of(name, good)) return;
  base::raise(ErrorKind::kUsage,
              base::cat("init_rpc: \"", name,
                        "\" is not a valid worker name: 1 to 127 letters, digits, \"_\", \":\" and \"-\""));
}

void check_options(const RpcOptions& options) {
  if (options.num_worker_threads < 1) {
    base::raise(ErrorKind::kUsage, base::cat("init_rpc: num_worker_threads is ", options.num_worker_threads,
                                             "; at least 1 is needed"));
  }
  base::checked_timeout(options.rpc_timeout, "init_rpc: rpc_timeout");
  base::checked_timeout(options.init_timeout, "init_rpc: init_timeout");
  if (options.store && !options.init_method.empty()) {
    base::raise(ErrorKind::kUsage, "init_rpc: give a store or an init_method, not both");
  }
  const bool dynamic = options.membership == Membership::kDynamic;
  if (dynamic && options.world_size)
    base::raise(ErrorKind::kUsage, "init_rpc: a dynamic group has no world_size");
  if (options.store && !dynamic && (!options.rank || !options.world_size))
    base::raise(ErrorKind::kUsage, "init_rpc: with a store, rank and world_size are needed");
  if (options.rank && (*options.rank < 0 || *options.rank > 0xFFFF))
    base::raise(ErrorKind::kUsage, base::cat("init_rpc: rank ", *options.rank, " is not in 0 to 65535"));
  if (options.world_size && *options.world_size < 1)
    base::raise(ErrorKind::kUsage, base::cat("init_rpc: world_size is ", *options.world_size));
  for (const auto& [worker, map] : options.device_maps) internal::check_device_map(worker, map);
  for (const int device : options.devices) {
    if (device < 0) base::raise(ErrorKind::kUsage, base::cat("init_rpc: devices has ", device));
  }
  if (const auto clash = registration_clash(); !clash.empty())
    base::raise(ErrorKind::kUsage, "init_rpc: " + clash);
}

// The address of this host from which the meeting place is reached; "" when that is on this host's loopback,
// or nowhere. The kernel knows which of the host's addresses leads there; others reach this worker by that
// one.
std::string own_address(std::shared_ptr<Store> store) {
  if (const auto* prefixed = dynamic_cast<const PrefixStore*>(store.get()))
    store = prefixed->innermost_store();
  const auto* tcp = dynamic_cast<const TcpStore*>(store.get());
  const auto host = tcp != nullptr ? tcp->host() : base::environment(base::EnvVar::kMasterAddr);
  if (!host || net::names_loopback(*host)) return "";
  const std::string own = net::own_address_toward(*host);
  return net::names_loopback(own) ? "" : own;
}

struct Backends {
  base::Mutex mutex;
  std::map<std::string, MakeTransport> makers LOCKSTEP_GUARDED_BY(mutex);
};
Backends& backends() {
  static Backends list;
  // On first use, not by a static initialiser.
  static const bool filled = [] {
    const base::MutexLock lock(list.mutex);
    list.makers["host"] = [](const BackendRequest& request) {
      return transport::open_worker_transport(
          {.id = request.self.id,
           .name = request.self.name,
           .secret = JobSecret::from_environment(),
           .route = request.options->tcp_only ? transport::Route::kTcp : transport::Route::kAuto,
           .bind_host = request.options->bind_host,
           .insecure = base::environment_flag(base::EnvVar::kLockstepInsecure)});
    };
    return true;
  }();
  (void)filled;
  return list;
}

MakeTransport find_backend(const std::string& name) {
  const base::MutexLock lock(backends().mutex);
  const auto found = backends().makers.find(name);
  if (found != backends().makers.end()) return found->second;
  std::string names;
  for (const auto& [other, unused] : backends().makers) names += (names.empty() ? "" : ", ") + other;
  base::raise(ErrorKind::kUsage,
              base::cat("init_rpc: there is no RPC back end named \"", name, "\"; there are ", names));
}

// The n-th init_rpc of every rank meets in a place of its own.
std::string take_prefix(bool dynamic) {
  if (dynamic) return "rpc_dynamic";
  return base::cat("rpc_prefix_", count_init());
}

// A given store is used as it is; its rank and size were checked to be there.
RendezvousResult meet(const RpcOptions& options, bool dynamic) {
  if (options.store) {
    return {.store = options.store, .rank = options.rank, .world_size = options.world_size};
  }
  return rendezvous({.init_method = options.init_method.empty() ? "env://" : options.init_method,
                     .rank = options.rank,
                     .world_size = options.world_size,
                     .timeout = options.init_timeout,
                     .open_ended = dynamic});
}

// Pre: of a group of fixed size, so both are set.
void check_place(const RendezvousResult& place) {
  if (*place.rank < 0 || *place.rank >= *place.world_size || *place.world_size > 0x10000) {
    base::raise(ErrorKind::kUsage,
                base::cat("init_rpc: rank ", *place.rank, " in a world of ", *place.world_size));
  }
}

// Until this worker waits for no answer, and, if asked, runs nothing for others. A worker of a dynamic group
// that leaves cannot wait for calls of others to end: they may keep coming until the others know.
enum class Idle : std::uint8_t { kOwnCalls, kAllCalls };
void wait_idle(Agent& agent, Deadline deadline, Idle idle) {
  std::optional<base::SlowWait> slow;
  while (agent.n_waiting() != 0 || (idle == Idle::kAllCalls && agent.n_running() != 0)) {
    if (deadline.expired()) {
      base::raise(ErrorKind::kTimeout,
                  base::cat("shutdown: ", agent.n_waiting(), " calls of this worker have no answer yet, ",
                            agent.n_running(), " calls of others still run here"));
    }
    if (!slow) slow.emplace(deadline);
    slow->say_if_due([&] {
      return base::cat("shutdown of ", agent.self().name,
                       " waits for answers to its calls: ", agent.unanswered(), "; ", agent.n_running(),
                       " calls of others still run here");
    });
    // Polled: nothing signals "no call in progress", and this runs once, at the end.
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

// Gives back what this worker refers to, and waits until the owners know.
void drop_rrefs(Agent& agent, Deadline deadline) {
  auto& rrefs = rref_manager(agent);
  rrefs.drop_users();
  if (!rrefs.wait_idle(deadline))
    base::raise(ErrorKind::kTimeout, "shutdown: RRefs could not be released in time");
}

//   1, 2  no call runs or waits anywhere      3  all RRefs are given back: owners may check for leaks
//   4     nobody sends any more: connections that end from now on are no losses
void leave_static(Agent& agent, Deadline deadline) {
  auto& barrier = agent.service<internal::ShutdownBarrier>();
  // Twice: what ran for a worker that had come to the first round may have called another that had been idle.
  for (std::uint32_t round = 1; round <= 2; ++round) {
    wait_idle(agent, deadline, Idle::kAllCalls);
    barrier.meet(round, deadline);
  }
  drop_rrefs(agent, deadline);
  barrier.meet(3, deadline);
  agent.expect_ends();
  barrier.meet(4, deadline);
}

// In both cases own calls end first (their arguments may hold RRefs), then RRefs, then the membership.
void leave(Agent& agent, Session& session, Deadline deadline) {
  if (session.dynamic) {
    wait_idle(agent, deadline, Idle::kOwnCalls);  // others may go on calling until they are notified
    drop_rrefs(agent, deadline);
    session.dynamic->leave(deadline);
  } else {
    leave_static(agent, deadline);
  }
  // Nobody else is left to refer to anything, but for workers of a dynamic group.
  rref_manager(agent).check_leaks(session.options.strict_rref_check ? RRefManager::LeakCheck::kStrict
                                                                    : RRefManager::LeakCheck::kWarn);
}

}  // namespace

void RpcOptions::set_device_map(const std::string& worker, const DeviceMap& map) {
  DeviceMap merged = device_maps[worker];
  for (const auto& [from, to] : map) merged[from] = to;
  internal::check_device_map(worker, merged);
  device_maps[worker] = std::move(merged);
}

namespace {

// `name` unset: worker<number>.
void init_worker(const std::optional<std::string>& name, RpcOptions options) {
  if (name) check_name(*name);
  check_options(options);
  if (is_initialized()) base::raise(ErrorKind::kUsage, "init_rpc was called before; call shutdown first");
  // As much as possible is checked before the others are met: a worker with wrong options must not make them
  // wait.
  const auto make_transport = find_backend(options.backend);
  const Deadline deadline = Deadline::after(options.init_timeout);
  const bool dynamic = options.membership == Membership::kDynamic;
  const auto place = meet(options, dynamic);
  if (dynamic && !place.store)
    base::raise(ErrorKind::kUsage, "init_rpc: a dynamic group needs a store or an address");
  if (!dynamic) check_place(place);
  if (options.bind_host.empty()) options.bind_host = own_address(place.store);
  // Counted when nothing about the options can be wrong any more: a worker that was refused meets the others
  // all the same.
  auto session = std::make_shared<Session>(Session{
      .options = options,
      .store = place.store ? std::make_shared<PrefixStore>(take_prefix(dynamic), place.store) : nullptr});
  // Met by a URL: 0 is asked for by the worker that holds the store.
  if (dynamic && !options.store) internal::keep_number(*session->store, 0);
  if (dynamic && options.rank) internal::claim_number(*session->store, static_cast<WorkerId>(*options.rank));
  const WorkerId id = dynamic && !options.rank ? internal::take_number(*session->store)
                                               : static_cast<WorkerId>(dynamic ? *options.rank : *place.rank);
  const WorkerInfo self{.id = id, .name = name ? *name : base::cat("worker", id)};
  // From here on the agent has threads and an address; what fails below must close it.
  const auto agent = Agent::start({.self = self,
                                   .num_worker_threads = options.num_worker_threads,
                                   .rpc_timeout = options.rpc_timeout,
                                   .rank = base::this_rank_thread(),
                                   .device_maps = options.device_maps,
                                   .devices = options.devices,
                                   .extensions = options.extensions},
                                  make_transport({.self = self, .options = &options}));
  try {
    // Before others can call: their functions ask for the current agent.
    set_current_agent(agent, session);
    if (dynamic) {
      session->dynamic = internal::DynamicGroup::join(session->store, agent, deadline);
    } else if (session->store) {
      internal::join_static(*session->store, *agent, *place.world_size, deadline);
    }
  } catch (...) {
    set_current_agent(nullptr);
    agent->close(Milliseconds(0));
    throw;
  }
}

}  // namespace

void start(const std::string& name, RpcOptions options) {
  init_worker(name, std::move(options));
}

void start(RpcOptions options) {
  init_worker(std::nullopt, std::move(options));
}

void shutdown(ShutdownOptions options) {
  const auto agent = current_agent("shutdown");
  if (agent->on_own_thread()) {
    base::raise(
        ErrorKind::kUsage,
        "shutdown: called by a function that runs for another worker, on one of the agent's own threads");
  }
  const auto session = std::static_pointer_cast<Session>(current_session());
  const Deadline deadline = Deadline::after(base::checked_timeout(options.timeout, "shutdown"));
  // Whatever goes wrong while leaving, the agent is closed; the caller learns of the problem afterwards.
  std::exception_ptr problem;
  if (options.graceful) {
    try {
      leave(*agent, *session, deadline);
    } catch (...) {
      problem = std::current_exception();
    }
  }
  agent->expect_ends();
  session->dynamic = nullptr;
  agent->close(options.graceful ? Milliseconds(1000) : Milliseconds(0));
  set_current_agent(nullptr);
  if (problem) std::rethrow_exception(problem);
}

bool is_initialized() noexcept {
  const auto agent = current_agent_if_any();
  return agent != nullptr && !agent->closed();
}

WorkerInfo get_worker_info(const std::string& name) {
  const auto agent = current_agent("get_worker_info");
  return name.empty() ? agent->self() : agent->find(name);
}

std::vector<WorkerInfo> get_worker_infos() {
  return current_agent("get_worker_infos")->workers();
}
Milliseconds get_rpc_timeout() {
  return current_agent("get_rpc_timeout")->rpc_timeout();
}
void set_rpc_timeout(Milliseconds timeout) {
  current_agent("set_rpc_timeout")->set_rpc_timeout(timeout);
}
std::map<std::string, std::string> get_debug_info() {
  return current_agent("get_debug_info")->debug_info();
}

DeviceMaps get_device_maps() {
  current_agent("get_device_maps");
  return std::static_pointer_cast<Session>(current_session())->options.device_maps;
}

void register_rpc_backend(const std::string& name, MakeTransport make) {
  const base::MutexLock lock(backends().mutex);
  if (!backends().makers.try_emplace(name, std::move(make)).second) {
    base::raise(ErrorKind::kUsage, base::cat("there is an RPC back end named \"", name, "\" already"));
  }
}

bool is_rpc_backend_available(const std::string& name) {
  const base::MutexLock lock(backends().mutex);
  return backends().makers.contains(name);
}

}  // namespace lockstep::rpc
