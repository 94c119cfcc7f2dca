// The origin of a backward pass, which plans it, runs its own part and waits for the others'
// (backward_part.cpp). The messages between an origin O and a worker W (SMART; FAST has no plan):
//
//   O -> W  plan: these send nodes will be reached    W answers with the recv nodes behind them, by worker
//   O -> W  gradients                                 W answers at once, and runs its part on the thread that found the message
//   W -> V  gradients, if its part leads on to V
//   W -> O  done, with whom W sent gradients to       so that O knows every worker whose report it waits for
//
// A failure anywhere goes to O first, which sends abort to everyone the plan named; a worker passes it on to
// those it told itself, and answers when they have. No lock of the service or of a pass is held while a
// message is sent.
#include <ATen/ops/ones_like.h>

#include <algorithm>

#include "lockstep/autograd/internal/service.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::autograd::internal {
namespace {

void check_roots(const std::vector<at::Tensor>& roots) {
  const auto refuse = [](std::size_t i, const std::string& why) {
    base::raise(ErrorKind::kUsage, base::cat("autograd::backward: root ", i, " ", why));
  };
  if (roots.empty()) base::raise(ErrorKind::kUsage, "autograd::backward: no roots were given");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (!roots[i].defined()) refuse(i, "is an undefined tensor");
    if (roots[i].numel() != 1)
      refuse(i, base::cat("is not a scalar but of shape ", roots[i].sizes(),
                          "; a loss is one number, as .sum() or .mean() gives"));
    if (!roots[i].requires_grad()) {
      refuse(i,
             "does not require gradients; results of remote calls do when the call was made in an autograd "
             "context, "
             "with gradients enabled");
    }
    if (!roots[i].grad_fn()) refuse(i, "is a leaf: it has no gradient function to go back through");
  }
}

// The answers to one wave of plan requests. Any thread adds one.
class Wave {
 public:
  Wave(std::size_t n, std::weak_ptr<rpc::Agent> agent) : n_left_(n), over_(std::move(agent)) {}

  void add(WorkerId worker, const rpc::Agent::Answer* answer, const rpc::CallFailure* failure) {
    std::optional<NodeFailure> wrong;
    PlanRequests requests;
    try {
      if (failure != nullptr) {
        wrong = NodeFailure::of(worker, *failure);
      } else {
        base::ByteReader reader(answer->body.bytes);
        if (need(reader.get<std::uint8_t>()) == kOk) {
          requests = read_plan_requests(reader);
        } else {
          wrong = NodeFailure::read(reader);
        }
      }
    } catch (...) {
      wrong = NodeFailure::of(worker, rpc::current_call_failure());
    }
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [further, messages] : requests) {
        auto& all = next_[further];
        all.insert(all.end(), messages.begin(), messages.end());
      }
      --n_left_;
      if (failure_ || (!wrong && n_left_ > 0)) return;
      failure_ = std::move(wrong);
    }
    over_.set();
  }

  // Until all have answered, or one has failed; every request has a timeout of its own.
  void wait(const std::function<std::string()>& waiting) {
    over_.future().state()->wait_over(Deadline::never(), waiting);
  }
  PlanRequests next() const {
    const std::lock_guard lock(mutex_);
    return next_;
  }
  std::optional<NodeFailure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::size_t n_left_;
  PlanRequests next_;
  std::optional<NodeFailure> failure_;
  const rpc::Promise<void> over_;
};

// Messages say "none" as zero (docs/wire.md).
std::int64_t on_wire(Milliseconds timeout) {
  return timeout == kNoTimeout ? 0 : timeout.count();
}

}  // namespace

Milliseconds AutogradService::timeout_of(const Pass& pass) const {
  if (pass.deadline().is_never()) return kNoTimeout;
  const auto left = std::chrono::duration_cast<Milliseconds>(pass.deadline().remaining());
  return std::max(left, Milliseconds(1));
}

//   plan (SMART), or open all sends (FAST) --> run the own part --> wait for all reports --> leave
//                         '------------------------'-------------------'---failure--> abort the others, wait 2 s, leave, raise
//
// After a failure the others are waited for briefly, so that the next pass in this context does not meet
// remains of this one.
void AutogradService::backward(std::uint64_t context, const std::vector<at::Tensor>& roots,
                               const BackwardOptions& options) {
  check_roots(roots);
  const auto state = find(context);
  if (!state)
    base::raise(ErrorKind::kUsage,
                base::cat("autograd::backward: this worker has no autograd context ", context,
                          "; it is opened by DistAutogradContext, and over when that is destroyed"));
  edge_list edges;
  variable_list gradients;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
    gradients.push_back(at::ones_like(root.detach()));
  }
  const Milliseconds timeout = agent_.timeout_or_default(options.timeout);
  const PassHead head{.context = context,
                      .pass = agent_.new_id(),
                      .origin = self(),
                      .retain_graph = options.retain_graph,
                      .fast = options.mode == Mode::kFast,
                      .timeout_ms = on_wire(timeout)};
  if (const auto other = state->pass(); other && !other->failed()) {
    base::raise(ErrorKind::kUsage, base::cat("autograd::backward: a backward pass of autograd context ",
                                             context, " is under way; a context has one at a time"));
  }
  const auto pass = state->enter(head.pass, [&] { return std::make_shared<Pass>(*this, state, head); });
  try {
    if (head.fast) {
      pass->open_roots(edges);
    } else {
      const auto workers = plan(pass, edges);
      pass->expect(workers);
      check_present(pass, workers);
    }
    pass->run(edges, std::move(gradients));
    pass->await_others();
  } catch (...) {
    pass->fail(NodeFailure::of(self(), rpc::current_call_failure()));
    rpc::Promise<void> given_up(agent_.weak_from_this());
    abort_others(*pass, [given_up] { given_up.set(); });
    given_up.future().state()->wait_over(Deadline::after(kGiveUp));
    leave(pass);
    const auto failure = *pass->failure();
    failure.raise(name_of(failure.worker), failure.worker != self());
  }
  leave(pass);
}

// Ends because a send node is planned once: each wave names only nodes that were new.
std::vector<WorkerId> AutogradService::plan(const std::shared_ptr<Pass>& pass, const edge_list& roots) {
  std::set<WorkerId> workers;
  for (auto requests = pass->plan_roots(roots); !requests.empty();) {
    for (const auto& [worker, messages] : requests) workers.insert(worker);
    requests = ask(pass, requests);
    // What leads back here may lead on from here.
    if (const auto mine = requests.extract(self())) {
      for (auto& [worker, messages] : pass->plan_sends(mine.mapped())) {
        auto& all = requests[worker];
        all.insert(all.end(), messages.begin(), messages.end());
      }
    }
  }
  return {workers.begin(), workers.end()};
}

PlanRequests AutogradService::ask(const std::shared_ptr<Pass>& pass, const PlanRequests& requests) {
  const auto wave = std::make_shared<Wave>(requests.size(), agent_.weak_from_this());
  for (const auto& [worker, messages] : requests) {
    pass->note_told(worker);
    auto writer = with_head(pass->head());
    write_messages(writer, messages);
    agent_.request(worker, rpc::MessageKind::kBackwardPlan, {.body = writer.take()}, timeout_of(*pass),
                   "the plan of a backward pass",
                   [wave, worker = worker](rpc::Agent::Answer* answer, const rpc::CallFailure* failure) {
                     wave->add(worker, answer, failure);
                   });
  }
  wave->wait([this, &pass] {
    return base::cat("autograd::backward of context ", pass->head().context, ": worker ", name_of(self()),
                     " waits for the others' part of its plan: ", agent_.unanswered());
  });
  if (const auto failure = wave->failure()) {
    pass->fail(*failure);
    base::raise(ErrorKind::kAborted, "the backward pass could not be planned");
  }
  return wave->next();
}

// RRefs.

namespace {

void backward_from(const rpc::RRef<at::Tensor>& root, std::uint64_t context, bool retain_graph, bool fast,
                   std::int64_t timeout_ms) {
  autograd::backward(Context(context), {root.local_value()},
                     {.retain_graph = retain_graph,
                      .mode = fast ? Mode::kFast : Mode::kSmart,
                      .timeout = timeout_ms == 0 ? kNoTimeout : Milliseconds(timeout_ms)});
}
LOCKSTEP_RPC_FUNCTION(backward_from, "lockstep.autograd.backward_from");

}  // namespace

void backward_from_rref(const Context& context, const rpc::RRef<at::Tensor>& root,
                        const BackwardOptions& options) {
  if (!root.valid()) base::raise(ErrorKind::kUsage, "autograd::backward: the RRef refers to nothing");
  if (root.is_owner()) {
    autograd::backward(context, {root.local_value()}, options);
    return;
  }
  const auto agent = rpc::current_agent("autograd::backward");
  const Milliseconds timeout = agent->timeout_or_default(options.timeout);
  // The pass has its own timeout there, and says more about it than the call would: that one comes later.
  rpc::rpc_sync(root.owner(), backward_from,
                {root, context.id(), options.retain_graph, options.mode == Mode::kFast, on_wire(timeout)},
                {.timeout = timeout == kNoTimeout ? timeout : timeout + kGiveUp + kGiveUp});
}

}  // namespace lockstep::autograd::internal
