#include "lockstep/rpc/agent.h"

#include <random>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/internal/device_directory.h"
#include "lockstep/rpc/internal/pool.h"
#include "lockstep/rpc/internal/shutdown_barrier.h"
#include "lockstep/rpc/internal/worker_directory.h"

namespace lockstep::rpc {
namespace {

// Random, so that the ids of a worker and of one that had its number before do not meet: late answers and
// RRef messages of the old one find nothing. 46 bits, which leaves room to count up within the 48 that
// new_id() has.
std::uint64_t first_id() {
  std::random_device random;
  return ((std::uint64_t{random()} << 32 | random()) >> 18) + 1;
}

}  // namespace

CallScope& this_call() {
  thread_local CallScope scope;
  return scope;
}

std::shared_ptr<Agent> Agent::start(AgentOptions options, std::unique_ptr<transport::Transport> transport) {
  std::shared_ptr<Agent> agent(new Agent(std::move(options), std::move(transport)));
  // Handlers and services are complete before the pool has a thread, so they are read without a lock for the
  // agent's whole life.
  agent->handle(MessageKind::kCall, internal::serve_call);
  agent->services_.push_back(make_rref_service(*agent));
  agent->services_.push_back(std::make_unique<internal::Gatherings>(*agent));
  agent->services_.push_back(std::make_unique<internal::ShutdownBarrier>(*agent));
  for (const Extension extend : agent->options_.extensions) {
    if (auto service = extend(*agent)) agent->services_.push_back(std::move(service));
  }
  agent->pool_ = std::make_unique<internal::Pool>(
      internal::Pool::Duties{.step = [self = agent.get()] { return self->step(Taker::kPoller); },
                             .rest = [self = agent.get()] { self->rest(); },
                             .wake = [self = agent.get()] { self->transport_->wake(); }},
      internal::Pool::Options{.n_threads = agent->options_.num_worker_threads, .rank = agent->options_.rank});
  agent->pool_->start();
  return agent;
}

Agent::Agent(AgentOptions options, std::unique_ptr<transport::Transport> transport)
    : options_(std::move(options)),
      transport_(std::move(transport)),
      directory_(std::make_unique<internal::WorkerDirectory>()),
      devices_(std::make_unique<internal::DeviceDirectory>(options_.self, options_.device_maps)),
      rpc_timeout_ms_(options_.rpc_timeout.count()),
      next_id_(first_id()),
      earliest_ns_(Deadline::never().monotonic_ns()) {
  directory_->add(options_.self);
  directory_->list(options_.self.id);
}

Agent::~Agent() {
  try {
    close(Milliseconds(0));
  } catch (...) {
    base::log(LogLevel::kError, "an RPC agent could not be closed: " + base::current_failure().message);
  }
}

Milliseconds Agent::rpc_timeout() const {
  return Milliseconds(rpc_timeout_ms_.load());
}

void Agent::set_rpc_timeout(Milliseconds timeout) {
  rpc_timeout_ms_ = base::checked_timeout(timeout, "set_rpc_timeout").count();
}

Milliseconds Agent::timeout_or_default(const std::optional<Milliseconds>& timeout) const {
  return timeout ? base::checked_timeout(*timeout, "a remote call") : rpc_timeout();
}

// The directory and the services first: as soon as the transport knows the peer its messages are delivered,
// and must find it known.
void Agent::add_worker(const WorkerInfo& info, const Bytes& address, const DeviceMap& map) {
  if (info.id == options_.self.id) return;
  // Known before its first message can arrive; found only when messages to it have a way, which its first
  // message proves as well (take()).
  const std::uint64_t incarnation = directory_->add(info);
  devices_->set(info.id, map);
  ++n_joining_;
  try {
    for (const auto& service : services_) service->on_joined(info.id);
    transport_->add_peer(info.id, info.name, address);
    directory_->list(info.id, incarnation);
    --n_joining_;
  } catch (...) {
    --n_joining_;
    take_loss(info.id, "it could not be added: " + base::current_failure().message, false, incarnation);
    throw;
  }
}

void Agent::remove_worker(WorkerId id, const std::string& cause) {
  // Also of one that is gone already: a transport that never reached it may not know, and its number may come
  // back.
  transport_->remove_peer(id);
  if (directory_->present(id)) take_loss(id, cause, true);
}

WorkerInfo Agent::find(const Worker& worker) const {
  return directory_->find(worker);
}
WorkerInfo Agent::info(WorkerId id) const {
  return directory_->info(id);
}
int Agent::device_target(WorkerId to, Leg leg, int index) const {
  return devices_->target(info(to), leg, index);
}
std::vector<WorkerInfo> Agent::workers() const {
  return directory_->present();
}
std::vector<WorkerId> Agent::gone() const {
  return directory_->gone();
}

void Agent::handle(MessageKind kind, Handler handler, Runs runs) {
  handlers_.at(static_cast<std::size_t>(kind)) = {.handler = std::move(handler), .runs = runs};
}

void Agent::no_service() {
  base::raise(ErrorKind::kUnsupported,
              "this worker's agent has no distributed autograd: start it with lockstep::init_rpc "
              "(lockstep/remote/init_rpc.h), not with rpc::start alone");
}

// Threads.

void Agent::before_sleep() {
  pool_->before_sleep();
}
void Agent::after_sleep() {
  pool_->after_sleep();
}

void Agent::run(std::function<void()> task) {
  pool_->post(std::move(task));
}

void Agent::run_callbacks(std::vector<internal::FutureBase::Callback> callbacks) {
  if (callbacks.empty()) return;
  // A thread that helps is inside a wait, perhaps with locks held; a callback must not run under those.
  if (pool_->is_mine() && !helping()) {
    internal::FutureBase::run(std::move(callbacks));
  } else {
    // Whatever happens to the task: futures that hang on these callbacks must end.
    struct Surely {
      ~Surely() { internal::FutureBase::run(std::move(callbacks)); }
      std::vector<internal::FutureBase::Callback> callbacks;
    };
    auto shared = std::make_shared<Surely>();
    shared->callbacks = std::move(callbacks);
    run([shared] { internal::FutureBase::run(std::exchange(shared->callbacks, {})); });
  }
}

std::size_t Agent::n_waiting() const {
  const base::MutexLock lock(mutex_);
  return pending_.size();
}

std::size_t Agent::n_running() const {
  return n_running_.load();
}

std::map<std::string, std::string> Agent::debug_info() const {
  std::map<std::string, std::string> info;
  info["agent.num_pending_requests"] = std::to_string(n_waiting());
  info["agent.thread_pool_size"] = std::to_string(pool_->n_threads());
  info["agent.num_idle_threads"] = std::to_string(pool_->n_idle());
  info["agent.client_active_calls"] = std::to_string(n_waiting());
  info["agent.server_active_calls"] = std::to_string(n_running());
  info["agent.num_workers"] = std::to_string(workers().size());
  for (const auto& service : services_) service->debug_info(info);
  return info;
}

bool Agent::on_own_thread() const {
  return pool_ && pool_->is_mine();
}

// closed_ is set under mutex_, so that request() either finds it or has its entry in pending_ before
// fail_pending() runs. Then: services, calls in flight, threads, and the connections last, since the threads
// still send answers.
void Agent::close(Milliseconds flush) {
  if (on_own_thread()) {
    base::raise(ErrorKind::kUsage, "an RPC agent cannot be shut down by one of its own threads");
  }
  {
    const base::MutexLock lock(mutex_);
    if (closed_.exchange(true)) return;
  }
  for (const auto& service : services_) service->on_close();
  fail_pending([](const Pending&) { return true; },
               [](const Pending& pending) {
                 return Failure{.kind = ErrorKind::kAborted,
                                .message = base::cat(pending.what, ": the RPC agent was shut down")};
               });
  // Joins the threads; afterwards no handler runs.
  if (pool_) pool_->stop();
  for (const auto& service : services_) service->on_closed();
  transport_->close(flush.count() == 0 ? Deadline::now() : Deadline::after(flush));
}

}  // namespace lockstep::rpc
