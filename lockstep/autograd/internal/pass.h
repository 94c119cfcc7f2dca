// One backward pass as one worker sees it: its part of the graph, the gradients that came for it, who else
// takes part, and how it failed.
//
//   SMART: plan_roots, plan_sends (many) --+                                    +--> over: every expected gradient came, all nodes ran
//                                          +--> running (one thread, once) --+
//   FAST: opened whole, by the first use --+                                    +--> failed: fail(), from any thread, at any time
//
// The worker where backward() was called (the origin) also collects the reports of the others.
// Who touches graph_: whoever holds mutex_ before running_ is set, afterwards the running thread alone,
// without the lock. Gradients that arrive then go to incoming_, under mutex_, and the running thread moves
// them into the graph.
// Thread safety: every method may be called from any thread; run() by one. Under mutex_ only look-ups of the
// context and the agent are called, which call nothing back.
// Ownership: shared by the context, whoever runs it, and requests under way.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/autograd/internal/context_state.h"
#include "lockstep/autograd/internal/local_graph.h"
#include "lockstep/autograd/internal/messages.h"

namespace lockstep::autograd::internal {

class AutogradService;

class Pass final : public std::enable_shared_from_this<Pass> {
 public:
  Pass(AutogradService& service, std::shared_ptr<ContextState> context, PassHead head);

  const PassHead& head() const { return head_; }
  ContextState& context() const { return *context_; }
  Deadline deadline() const { return deadline_; }
  bool is_origin() const;
  // The other pass may take its place: this one failed, or its own worker has begun another.
  bool superseded_by(const PassHead& other) const;

  // What must be asked of other workers: messages whose send nodes will be reached, by worker. What this
  // worker sent to itself is planned at once. Raises kUsage for messages that it does not know.
  PlanRequests plan_roots(const edge_list& roots);
  PlanRequests plan_sends(std::span<const std::uint64_t> messages);
  // FAST: the roots, and every send node of the context.
  void open_roots(const edge_list& roots);

  // Gradients for a send node. True, once: nobody runs this part yet, the caller must. Raises kUsage for
  // those that nobody waits for.
  bool take(std::uint64_t message, variable_list gradients);
  // Runs the local part until it is over, in the pass's context. Throws what a node throws, kTimeout at the
  // deadline, and an exception of no interest when fail() was called meanwhile.
  void run(const edge_list& roots = {}, variable_list gradients = {});
  bool running() const;
  // The pass that this thread runs. Raises kUsage when it runs none.
  static Pass& here();
  // From inside run().
  void send_gradients(const RecvNode& from, variable_list gradients);

  // False when it had failed before: the first failure counts. Wakes whoever waits.
  bool fail(NodeFailure failure);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::optional<NodeFailure> failure() const;
  // `worker` was asked to take part by this one; told() is all of them, at the origin also those that the
  // plan named.
  void note_told(WorkerId worker);
  std::vector<WorkerId> told() const;
  // Whom it sent gradients to.
  std::vector<WorkerId> sent_to() const;
  // It cannot end without that worker.
  bool involves(WorkerId worker) const;

  // At the origin: the workers that take part, as the plan found; a worker's part is over, and it sent
  // gradients to these; blocks until all have reported. Throws as run().
  void expect(const std::vector<WorkerId>& workers);
  void report(WorkerId worker, const std::vector<WorkerId>& sent_to);
  void await_others();

 private:
  struct Incoming {
    SendNode& node;  // held by expected_
    variable_list gradients;
    std::shared_ptr<object::DeviceEvents> events;  // of copies to a device; null: none are
  };
  struct Expected {
    compat::NodeOwner<SendNode> node;
    bool arrived = false;
  };
  // Pre: mutex_ is held, nobody runs it.
  PlanRequests plan_reached();
  void expect_send(const compat::NodeOwner<SendNode>& node);
  void open();
  // For run(): true when a node is ready, false at the end.
  bool next();
  void use_up_sends();
  // Until something changed. Throws as run(). what(): what for, for messages; called with mutex_ held.
  void wait(std::unique_lock<std::mutex>& lock, const std::function<std::string()>& what);
  std::string names_of(const std::set<WorkerId>& workers) const;
  // Pre: mutex_ is held by `lock`; lets go of it.
  void ring(std::unique_lock<std::mutex>& lock);
  std::set<WorkerId> missing() const;

  AutogradService& service_;
  const std::shared_ptr<ContextState> context_;
  const PassHead head_;
  const Deadline deadline_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> news_{false};  // mail, or a failure

  mutable std::mutex mutex_;
  // Guarded by mutex_; graph_ until running_, then the runner's.
  LocalGraph graph_;
  std::map<std::uint64_t, Expected> expected_;  // by message
  std::size_t n_to_come_ = 0;
  std::deque<Incoming> incoming_;
  bool opened_ = false;
  bool running_ = false;
  std::set<WorkerId> told_;
  std::set<WorkerId> sent_to_;
  std::set<WorkerId> workers_;   // at the origin: who takes part
  std::set<WorkerId> reported_;  // at the origin: whose part is over
  std::optional<NodeFailure> failure_;
  std::optional<rpc::Promise<void>> bell_;
};

}  // namespace lockstep::autograd::internal
