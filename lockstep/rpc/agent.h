// A worker's agent: sends requests and matches their answers, executes the requests of others, and notices
// lost workers.
//
// Everything that crosses workers (calls, RRefs, gradients) is a request of some MessageKind with an answer;
// layers register a handler per kind. Programs use rpc.h; this is for layers, and for tests that run several
// agents in one process.
//
// Threads ("ls-rpc"): started on demand, up to num_worker_threads that run at once; while one blocks in
// Future::wait, another may be started, so nested calls cannot exhaust them. One of them is the poller: it
// sleeps in the transport, and runs a short request where it finds it. When a handler takes longer than half
// a millisecond, or waits for a future, another thread becomes the poller, so no handler blocks the agent. A
// thread in Future::wait first fetches messages itself for a moment.
// Thread safety: every method may be called from any thread. Ownership: shared; futures hold it weakly.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/rpc/device_map.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/message_kind.h"
#include "lockstep/transport/transport.h"

namespace lockstep::rpc {

namespace internal {
class DeviceDirectory;
class Pool;
class WorkerDirectory;

// What a message carries beside its bytes at the sender: forks of RRefs, which are released if the message is
// not sent.
class SendGuard {
 public:
  virtual ~SendGuard() = default;
  virtual void sent() noexcept = 0;
};
}  // namespace internal

class Agent;

// What a request or an answer carries.
struct Payload {
  Bytes body{};
  object::Blobs blobs{};
  std::shared_ptr<internal::SendGuard> guard{};
  // Of tensors on devices into the blobs: it is sent when they are over. Null: it is complete.
  std::shared_ptr<object::DeviceCopies> copies{};
};

// An incoming request. Answered once, from any thread, at any time; one that is dropped unanswered fails at
// its caller.
class Request {
 public:
  Request(std::shared_ptr<Agent> agent, WorkerId from, transport::Message message);
  Request(Request&&) noexcept;
  Request& operator=(Request&&) = delete;
  ~Request();

  Agent& agent() const { return *agent_; }
  const std::shared_ptr<Agent>& shared_agent() const { return agent_; }
  WorkerId from() const { return from_; }
  MessageKind kind() const { return static_cast<MessageKind>(message_.kind); }
  std::span<const std::uint8_t> body() const { return message_.body.bytes; }
  const object::Blobs& blobs() const { return message_.blobs; }
  // Releases the received bytes once they are decoded: tensors hold their own references.
  void release() { message_.body = {}, message_.blobs.clear(); }

  void answer(Payload payload);
  void answer_failure(const CallFailure& failure) noexcept;

 private:
  std::shared_ptr<Agent> agent_;  // null once answered
  WorkerId from_ = 0;
  transport::Message message_;
};

// A layer's part of an agent, created with it (Extension) and destroyed before it.
class Service {
 public:
  virtual ~Service() = default;
  // `peer` is gone, or has left. Called once per peer, before the calls to it fail.
  virtual void on_lost(WorkerId peer, const std::string& cause) = 0;
  // `peer` has joined, perhaps with the number of a worker that is gone.
  virtual void on_joined(WorkerId /*peer*/) {}
  // Adds lines to get_debug_info.
  virtual void debug_info(std::map<std::string, std::string>& info) = 0;
  // The agent is about to close: nothing can be sent afterwards. For tear-down that must not wait.
  virtual void on_close() {}
  // The agent's threads have ended.
  virtual void on_closed() {}
};

// Lets a layer attach data about tensors to calls: distributed autograd. Runs on the thread that encodes or
// decodes.
class CallExtension {
 public:
  virtual ~CallExtension() = default;
  // Runs `encode`, which writes arguments or a result for `to`, in autograd context `context` (not 0); what
  // it returns is sent along, and passed to decode() there.
  virtual Bytes encode(std::uint64_t context, WorkerId to, const std::function<void()>& encode) = 0;
  // `leg`: on which `from` sent it.
  virtual void decode(std::uint64_t context, WorkerId from, Leg leg,
                      std::span<const std::uint8_t> extension_bytes, const std::function<void()>& decode) = 0;
};

// What a layer above adds to an agent: called once per agent while it is constructed, before it has threads.
// Returns the layer's part of the agent; null from a layer that only registers functions of the process,
// which it does once.
using Extension = std::unique_ptr<Service> (*)(Agent& agent);

struct AgentOptions {
  WorkerInfo self{};
  int num_worker_threads = 16;
  Milliseconds rpc_timeout{60'000};  // of calls that give none; kNoTimeout: none
  base::RankThread* rank = nullptr;  // that its threads act for
  DeviceMaps device_maps{};          // as in RpcOptions; checked
  std::vector<int> devices{};
  std::vector<Extension> extensions{};
};

class Agent final : public internal::WaitHelper, public std::enable_shared_from_this<Agent> {
 public:
  // Starts its first thread. The transport's peers are added by add_worker.
  static std::shared_ptr<Agent> start(AgentOptions options, std::unique_ptr<transport::Transport> transport);
  ~Agent() override;

  const WorkerInfo& self() const { return options_.self; }
  const AgentOptions& options() const { return options_; }
  Milliseconds rpc_timeout() const;
  // Raises kUsage unless it is positive; kNoTimeout is.
  void set_rpc_timeout(Milliseconds timeout);
  // Of one call: rpc_timeout() when unset. Raises kUsage unless it is positive.
  Milliseconds timeout_or_default(const std::optional<Milliseconds>& timeout) const;

  // The workers of the group. find raises kUsage naming them. `map`: the device map of its calls to this worker.
  void add_worker(const WorkerInfo& info, const Bytes& address, const DeviceMap& map = {});
  // The worker left by shutdown, or is considered lost. Pending calls to it fail; services are notified as of
  // a loss, with `cause`.
  void remove_worker(WorkerId id, const std::string& cause = "it left");
  WorkerInfo find(const Worker& worker) const;
  std::vector<WorkerInfo> workers() const;
  // Numbers of workers that were in the group, and are lost or have left.
  std::vector<WorkerId> gone() const;
  // Of a worker that may be gone; a placeholder name for a number that was never used.
  WorkerInfo info(WorkerId id) const;
  // The GPU of `to` for a tensor that is on cuda:`index` here. Raises kUsage when no map names one.
  int device_target(WorkerId to, Leg leg, int index) const;
  // How others reach this one.
  Bytes address() const { return transport_->address(); }
  // From now on the end of another worker is expected: not logged as a loss.
  void expect_ends() { ends_expected_ = true; }

  // Handlers are set by services while they are constructed, and never later. A quick one never blocks and
  // runs wherever the message is found, even while that thread waits for something else. kEither runs there
  // too, and may block when helping() is false.
  enum class Runs : std::uint8_t { kInThread, kQuick, kEither };
  using Handler = std::function<void(Request)>;
  void handle(MessageKind kind, Handler handler, Runs runs = Runs::kInThread);

  // Sends a request; the future completes with the answer, the callee's exception (CallFailure::remote),
  // kPeerLost, or kTimeout after `timeout` (positive; kNoTimeout: never). `what` is for messages: "worker1's
  // function add".
  struct Answer {
    object::Blob body{};
    object::Blobs blobs{};
  };
  using OnAnswer = std::function<void(Answer*, const CallFailure*)>;
  // As above, but calls back with one of the two, on whatever thread: it must not block, and hand user code
  // to run(). `future`: what on_answer ends, kept alive by it; for the text of who waits for it.
  void request(WorkerId to, MessageKind kind, Payload payload, Milliseconds timeout, const std::string& what,
               OnAnswer on_answer, const internal::FutureBase* future = nullptr);
  Future<Answer> request(WorkerId to, MessageKind kind, Payload payload, Milliseconds timeout,
                         const std::string& what);
  // For control messages that may safely arrive twice: retries when no answer arrives within a second, then
  // after one and a half times as long, with `n_tries` attempts in all. Completes with the answer or the last
  // failure; only timeouts are retried.
  Future<Answer> request_again(WorkerId to, MessageKind kind, Payload payload, const std::string& what,
                               int n_tries = 5);

  // Runs a task on a thread of the agent, where it may block.
  void run(std::function<void()> task);
  // On a thread of the agent that does nothing else: immediately. Otherwise as run(): a thread that waits may
  // hold locks.
  void run_callbacks(std::vector<internal::FutureBase::Callback> callbacks);

  CallExtension* extension() const { return extension_.load(std::memory_order_acquire); }
  void set_extension(CallExtension* extension) { extension_.store(extension, std::memory_order_release); }
  // The service of type S, which an extension made. Raises kUnsupported when the agent has none.
  template <class S>
  S& service() const {
    for (const auto& service : services_) {
      if (auto* wanted = dynamic_cast<S*>(service.get())) return *wanted;
    }
    no_service();
  }

  // A new id: this worker's number in the high 16 bits, a counter below.
  std::uint64_t new_id() { return (std::uint64_t{options_.self.id} << 48) | next_id_.fetch_add(1); }

  std::map<std::string, std::string> debug_info() const;
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Requests that wait for an answer, and requests of others that run here or wait to.
  std::size_t n_waiting() const;
  std::size_t n_running() const;
  // The former as text, a few of them: "worker1 (worker1's function add)"; "none".
  std::string unanswered() const;
  // The calling thread is one of the agent's.
  bool on_own_thread() const;
  // Shuts the agent down: calls in flight fail with kAborted, threads are joined, connections closed. Raises
  // kUsage on a thread of the agent. Later calls do nothing.
  void close(Milliseconds flush = Milliseconds(1000));

  // This thread waits for something else, and fetches messages meanwhile: what it finds must not block it.
  static bool helping();
  // WaitHelper.
  void help(const std::atomic<std::uint8_t>& over) override;
  void before_sleep() override;
  void after_sleep() override;
  base::Awaited awaited(const internal::FutureBase& future) const override;

 private:
  friend class Request;
  friend class internal::Pool;
  struct Pending {
    OnAnswer on_answer;
    WorkerId to;
    Deadline deadline;
    Milliseconds timeout;
    std::string what;
    const internal::FutureBase* future;
  };
  struct HandlerEntry {
    Handler handler;
    Runs runs = Runs::kInThread;
  };
  enum class Taker : std::uint8_t { kPoller, kHelper };

  Agent(AgentOptions options, std::unique_ptr<transport::Transport> transport);
  // What the threads run: processes one message, if there is one; false when there was none. Any error (above
  // all lack of memory) is logged and affects that message only: no exception may leave a thread of the
  // agent.
  bool step(Taker taker) noexcept;
  bool take_next(Taker taker);
  // Sleeps until there is something, or a call times out.
  void rest() noexcept;
  void take(transport::Event event, Taker taker);
  void take_answer(WorkerId from, transport::Message message);
  void take_request(WorkerId from, transport::Message message, Taker taker);
  // Completes the call. What on_answer throws is logged and, if it was given an answer, passed to it as a
  // failure.
  static void end_call(const Pending& pending, Answer* answer, const CallFailure* failure) noexcept;
  void run_handler(const HandlerEntry& entry, Request request) noexcept;
  bool worth_sharing() const;
  void note_duration(std::int64_t ns);
  // `incarnation`: see WorkerDirectory::end.
  void take_loss(WorkerId peer, const std::string& cause, bool orderly, std::uint64_t incarnation = 0);
  void note_unreachable(WorkerId to, const Failure& failure);
  void expire();
  void note_deadline(Deadline deadline);
  // A request whose pending entry exists: sends it, or ends it with what went wrong.
  void send_request(WorkerId to, MessageKind kind, std::uint64_t id, Payload payload, Deadline deadline,
                    const std::string& what);
  // On a thread of the agent, when the payload's copies are over.
  void send_when_copied(WorkerId to, MessageKind kind, std::uint64_t id, const Payload& payload,
                        Deadline deadline, const std::string& what);
  // What it failed with, if it did; logged unless the worker is gone.
  std::optional<Failure> send_answer(WorkerId to, transport::Message message) noexcept;
  // Nothing when there is none, or it waits for another worker than `from`.
  std::optional<Pending> take_pending(std::uint64_t id, std::optional<WorkerId> from = std::nullopt);
  std::vector<Pending> take_all(const std::function<bool(const Pending&)>& which);
  void fail_pending(const std::function<bool(const Pending&)>& which,
                    const std::function<Failure(const Pending&)>& why);
  [[noreturn]] static void no_service();

  const AgentOptions options_;
  const std::unique_ptr<transport::Transport> transport_;
  const std::unique_ptr<internal::WorkerDirectory> directory_;
  const std::unique_ptr<internal::DeviceDirectory> devices_;
  std::atomic<std::int64_t> rpc_timeout_ms_;
  std::atomic<std::uint64_t> next_id_;  // starts anywhere: a worker number that is reused repeats no ids
  std::atomic<bool> closed_{false};
  std::atomic<bool> ends_expected_{false};
  std::atomic<CallExtension*> extension_{nullptr};
  std::atomic<std::size_t> n_running_{0};
  std::atomic<int> n_joining_{0};                   // workers that add_worker() is adding
  std::atomic<int> n_in_row_{0};                    // messages the poller found one after the other
  std::atomic<std::int64_t> typical_ns_{0};         // time that a request takes
  std::array<HandlerEntry, kMaxKinds> handlers_;    // constant after start
  std::vector<std::unique_ptr<Service>> services_;  // constant after start

  mutable base::Mutex mutex_;
  std::unordered_map<std::uint64_t, Pending> pending_ LOCKSTEP_GUARDED_BY(mutex_);
  std::atomic<std::int64_t> earliest_ns_;  // no deadline of pending_ is before it
  std::unique_ptr<internal::Pool> pool_;   // last: its threads use everything above
};

// The targets of a message from `agent` to `to`.
class DeviceRoute final : public object::DeviceTargets {
 public:
  DeviceRoute(const Agent& agent, WorkerId to, Leg leg) : agent_(agent), to_(to), leg_(leg) {}
  int target(int index) const override { return agent_.device_target(to_, leg_, index); }

 private:
  const Agent& agent_;
  const WorkerId to_;
  const Leg leg_;
};

// This rank's agent. Raises kUsage naming `what` when init_rpc was not called, or shutdown was.
std::shared_ptr<Agent> current_agent(const char* what);
// As above, but null instead of raising.
std::shared_ptr<Agent> current_agent_if_any() noexcept;

// The context of the call whose function this thread runs; all zero outside one. Also set by autograd's
// context scope.
struct CallScope {
  std::uint64_t autograd_context = 0;  // 0: none
};
CallScope& this_call();

}  // namespace lockstep::rpc
