#include "lockstep/autograd/internal/pass.h"

#include <algorithm>

#include "lockstep/autograd/internal/service.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::autograd::internal {
namespace {

// What recv nodes ask for when the engine calls them: a node has no pointer to the pass that runs it. Passes
// nest when a node runs a pass of its own.
thread_local Pass* pass_here = nullptr;

// This thread runs a pass, and is in its context.
class Running {
 public:
  explicit Running(Pass& pass) : pass_before_(pass_here), call_before_(rpc::this_call()) {
    pass_here = &pass;
    rpc::this_call().autograd_context = pass.head().context;
  }
  ~Running() {
    pass_here = pass_before_;
    rpc::this_call() = call_before_;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Pass* const pass_before_;
  const rpc::CallScope call_before_;
};

[[noreturn]] void raise_stopped() {
  base::raise(ErrorKind::kAborted, "the backward pass was aborted");
}

}  // namespace

Pass::Pass(AutogradService& service, std::shared_ptr<ContextState> context, PassHead head)
    : service_(service),
      context_(std::move(context)),
      head_(head),
      deadline_(Deadline::after(Milliseconds(head.timeout_ms))),
      graph_(*context_, head.retain_graph) {}

bool Pass::is_origin() const {
  return head_.origin == service_.self();
}

// A worker's part of a pass that its origin has given up may still be around when the next one arrives: ids
// of one origin grow.
bool Pass::superseded_by(const PassHead& other) const {
  return failed() || (!is_origin() && other.origin == head_.origin && other.pass > head_.pass);
}

// Planning.

// SMART. A wave: the origin walks its graph from the roots to the recv nodes; each names a message of another
// worker, which walks on from the send node of that message. The walk counts how many gradients each node
// will get, so every worker must be planned before any gradient is sent.
PlanRequests Pass::plan_roots(const edge_list& roots) {
  const std::lock_guard lock(mutex_);
  for (const auto& root : roots) graph_.enter_root(root);
  return plan_reached();
}

PlanRequests Pass::plan_sends(std::span<const std::uint64_t> messages) {
  const std::lock_guard lock(mutex_);
  if (running_) base::raise(ErrorKind::kUsage, "a backward pass was planned while it ran");
  for (const auto message : messages) expect_send(context_->find_send(message));
  return plan_reached();
}

// What leads back to this worker is planned at once, which may reach further recv nodes: hence the loop.
PlanRequests Pass::plan_reached() {
  PlanRequests requests;
  for (auto reached = graph_.take_reached(); !reached.empty(); reached = graph_.take_reached()) {
    for (const RecvNode* recv : reached) {
      if (recv->from() == service_.self()) {
        expect_send(context_->find_send(recv->message()));
      } else {
        requests[recv->from()].push_back(recv->message());
      }
    }
  }
  return requests;
}

// Counted once per message, however many paths lead to it: the other worker sends one message with the sum.
void Pass::expect_send(const compat::NodeOwner<SendNode>& node) {
  if (!expected_.try_emplace(node->message(), Expected{.node = node}).second) return;
  ++n_to_come_;
  graph_.enter_send(*node);
}

void Pass::open_roots(const edge_list& roots) {
  const std::lock_guard lock(mutex_);
  for (const auto& root : roots) graph_.enter_root(root);
  open();
}

// FAST: no planning; every send node of the context is expected to get gradients. Pre: mutex_ is held.
void Pass::open() {
  if (opened_ || !head_.fast) return;
  opened_ = true;
  for (const auto& node : context_->open_sends()) expect_send(node);
  graph_.take_reached();
}

// Running.

// True for exactly one caller, the first: it runs this worker's part. Everything about the message is checked
// here, before the runner sees it, so that what is wrong is answered to the worker that sent it.
bool Pass::take(std::uint64_t message, variable_list gradients) {
  auto events = object::record_device_events();
  std::unique_lock lock(mutex_);
  if (failed()) return false;
  open();
  const auto found = expected_.find(message);
  if (found == expected_.end()) {
    context_->find_send(message);  // says what is wrong with it, if something is
    base::raise(ErrorKind::kUsage,
                base::cat("gradients arrived for message ", message, ", which the pass does not reach"));
  }
  if (found->second.arrived)
    base::raise(ErrorKind::kUsage, base::cat("gradients for message ", message, " came twice"));
  SendNode& node = *found->second.node;
  if (gradients.size() != node.n_tensors()) {
    base::raise(ErrorKind::kUsage,
                base::cat(gradients.size(), " gradients arrived for ", node.n_tensors(), " tensors"));
  }
  // Marked now, so that no other pass begins with it; the graph behind it is released when this part is over
  // (use_up_sends).
  found->second.arrived = true;
  if (!head_.retain_graph) node.mark_used();
  incoming_.push_back({.node = node, .gradients = std::move(gradients), .events = std::move(events)});
  const bool start = !std::exchange(running_, true);
  ring(lock);
  return start;
}

// After a failure as well: part of the graph has released its variables and cannot run again.
void Pass::use_up_sends() {
  if (head_.retain_graph) return;
  std::vector<compat::NodeOwner<SendNode>> used;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [message, expected] : expected_) {
      if (expected.arrived) used.push_back(expected.node);
    }
  }
  for (const auto& node : used) node->use_up();
}

// One thread runs a worker's part of a pass; others only add to what has arrived. So the graph itself needs
// no lock.
void Pass::run(const edge_list& roots, variable_list gradients) {
  {
    const std::lock_guard lock(mutex_);
    running_ = true;
  }
  const Running here(*this);
  try {
    run_in_engine([&] {
      for (std::size_t i = 0; i < roots.size(); ++i) graph_.deliver(roots[i], std::move(gradients[i]));
      while (next()) graph_.run_one();
      graph_.join_streams();
    });
    context_->add_events(object::record_device_events());
  } catch (...) {
    use_up_sends();
    throw;
  }
  use_up_sends();
}

// news_ is a hint that saves the lock between two nodes: set (release) by ring() under mutex_ after incoming_
// or failure_ changed. If it is missed here, the look under the lock below finds the mail before the thread
// sleeps, so nothing is lost.
bool Pass::next() {
  for (;;) {
    if (news_.exchange(false, std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (failure_) raise_stopped();
      for (; !incoming_.empty(); incoming_.pop_front()) {
        auto& [node, arrived, events] = incoming_.front();
        if (events) events->order();  // blocks no thread
        graph_.start(node, std::move(arrived));
        --n_to_come_;
      }
    }
    // Nodes that can run are run before anything is waited for: their results may be what another worker
    // waits for.
    if (!graph_.idle()) return true;
    std::unique_lock lock(mutex_);
    if (failure_) raise_stopped();
    if (!incoming_.empty()) continue;
    if (n_to_come_ == 0) return false;
    wait(lock, [this] {
      std::set<WorkerId> from;
      for (const auto& [message, expected] : expected_) {
        if (!expected.arrived) from.insert(expected.node->to());
      }
      return "gradients of " + names_of(from);
    });
  }
}

std::string Pass::names_of(const std::set<WorkerId>& workers) const {
  std::string names;
  for (const WorkerId worker : workers)
    names += base::cat(names.empty() ? "" : ", ", service_.agent().info(worker).name);
  return base::cat(workers.size() == 1 ? "worker " : "workers ", names);
}

// The bell is made under mutex_, and ring() takes it under mutex_: whatever changes after the caller's last
// look rings it. A Promise of the agent rather than a condition variable, so that a pool thread that waits
// here is replaced, and fetches messages first.
void Pass::wait(std::unique_lock<std::mutex>& lock, const std::function<std::string()>& what) {
  bell_.emplace(service_.agent().weak_from_this());
  const auto future = bell_->future();
  lock.unlock();
  const bool rung = future.state()->wait_over(deadline_, [&] {
    const std::lock_guard guard(mutex_);
    return base::cat("the backward pass of autograd context ", head_.context, ", begun by worker ",
                     service_.agent().info(head_.origin).name, ": worker ",
                     service_.agent().info(service_.self()).name, " waits for ", what());
  });
  lock.lock();
  if (!rung && !failure_ && deadline_.expired()) {
    auto late = rpc::timeout_failure(base::cat("a backward pass that waits for ", what()),
                                     Milliseconds(head_.timeout_ms));
    if (head_.fast)
      late.message +=
          "; FAST waits for every call made in the context, SMART only for those the loss depends on";
    base::raise(std::move(late));
  }
}

void Pass::ring(std::unique_lock<std::mutex>& lock) {
  news_.store(true, std::memory_order_release);
  const auto bell = std::exchange(bell_, std::nullopt);
  lock.unlock();
  if (bell) bell->set();
}

bool Pass::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

Pass& Pass::here() {
  if (pass_here == nullptr) {
    base::raise(
        ErrorKind::kUsage,
        "this graph continues on another worker, but backward() does not: call autograd::backward(context, "
        "{loss})");
  }
  return *pass_here;
}

// Called by a recv node, on the running thread. told_ and sent_to_ before the message: a failure that comes
// at once must find out whom to tell.
void Pass::send_gradients(const RecvNode& from, variable_list gradients) {
  if (from.from() == service_.self()) {
    take(from.message(), std::move(gradients));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    told_.insert(from.from());
    sent_to_.insert(from.from());
  }
  service_.send_gradients(shared_from_this(), from, gradients);
}

// Ends.

// The first failure stays. It rings, so that a runner that waits for gradients stops.
bool Pass::fail(NodeFailure failure) {
  std::unique_lock lock(mutex_);
  if (failure_) return false;
  failure_ = std::move(failure);
  // Read without the lock by failed(); release, so that whoever sees it finds failure_ under the lock.
  failed_.store(true, std::memory_order_release);
  ring(lock);
  return true;
}

std::optional<NodeFailure> Pass::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Pass::note_told(WorkerId worker) {
  const std::lock_guard lock(mutex_);
  told_.insert(worker);
}

// Whom an abort must reach: everybody that may hold a part of this pass.
std::vector<WorkerId> Pass::told() const {
  const std::lock_guard lock(mutex_);
  std::set<WorkerId> all = told_;
  all.insert(workers_.begin(), workers_.end());
  all.erase(service_.self());
  return {all.begin(), all.end()};
}

std::vector<WorkerId> Pass::sent_to() const {
  const std::lock_guard lock(mutex_);
  return {sent_to_.begin(), sent_to_.end()};
}

bool Pass::involves(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  if (reported_.contains(worker)) return false;
  return told_.contains(worker) || workers_.contains(worker) ||
         std::ranges::any_of(expected_, [&](const auto& entry) {
           return !entry.second.arrived && entry.second.node->to() == worker;
         });
}

void Pass::expect(const std::vector<WorkerId>& workers) {
  const std::lock_guard lock(mutex_);
  workers_.insert(workers.begin(), workers.end());
}

// A report may name workers that the origin did not know to take part (FAST): they are waited for from then
// on. The sender of gradients reports after it has sent them, so the set is complete when all of it has
// reported.
void Pass::report(WorkerId worker, const std::vector<WorkerId>& sent_to) {
  std::unique_lock lock(mutex_);
  reported_.insert(worker);
  workers_.insert(sent_to.begin(), sent_to.end());
  ring(lock);
}

std::set<WorkerId> Pass::missing() const {
  std::set<WorkerId> missing;
  std::ranges::set_difference(workers_, reported_, std::inserter(missing, missing.end()));
  missing.erase(service_.self());
  return missing;
}

// The origin's last step. Only what all workers have reported makes the gradients of the context final.
void Pass::await_others() {
  std::unique_lock lock(mutex_);
  workers_.insert(sent_to_.begin(), sent_to_.end());
  while (!failure_) {
    const auto workers = missing();
    if (workers.empty()) return;
    wait(lock, [this] { return names_of(missing()) + " to finish their part"; });
  }
  raise_stopped();
}

}  // namespace lockstep::autograd::internal
