// The messages of a backward pass. Between the origin O and a worker W (SMART; FAST has no plan):
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

constexpr std::uint8_t kOk = 0;
constexpr std::uint8_t kFailed = 1;
// How long a failed pass waits for the others to have given up, so that the context can be used at once.
constexpr Milliseconds kGiveUp{2000};

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

base::ByteWriter with_head(const Pass& pass) {
  base::ByteWriter writer;
  pass.head().write(writer);
  return writer;
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

// The origin.

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
    auto writer = with_head(*pass);
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

// Every worker.

bool AutogradService::is_over(std::uint64_t pass) const {
  const std::lock_guard lock(mutex_);
  return over_.contains(pass);
}

// Any message of a pass may be the first that reaches this worker.
std::shared_ptr<Pass> AutogradService::enter(const PassHead& head) {
  const auto refuse = [] { base::raise(ErrorKind::kAborted, "the backward pass was aborted"); };
  if (is_over(head.pass)) refuse();
  const auto state = find_or_make(head.context);
  if (!state) base::raise(ErrorKind::kUsage, base::cat("autograd context ", head.context, " was released"));
  auto pass = state->enter(head.pass, [&] { return std::make_shared<Pass>(*this, state, head); });
  // Looked at again after it is in the context: whoever ended it in between did not find it there, and this
  // thread must remove it.
  if (is_over(head.pass)) {
    state->leave(*pass);
    refuse();
  }
  return pass;
}

void AutogradService::serve_plan(rpc::Request request) {
  base::ByteWriter writer;
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto messages = read_messages(reader);
    const auto requests = enter(head)->plan_sends(messages);
    writer.put(kOk);
    write_plan_requests(writer, requests);
  } catch (...) {
    writer = {};
    writer.put(kFailed);
    NodeFailure::of(self(), rpc::current_call_failure()).write(writer);
  }
  request.answer({.body = writer.take()});
}

void AutogradService::send_gradients(const std::shared_ptr<Pass>& pass, const RecvNode& from,
                                     const variable_list& gradients) {
  rpc::Payload payload;
  auto writer = with_head(*pass);
  writer.put(from.message()).raw(lockstep::encode(gradients, payload.blobs));
  payload.body = writer.take();
  agent_.request(from.from(), rpc::MessageKind::kBackward, std::move(payload), timeout_of(*pass),
                 "gradients of a backward pass",
                 [this, pass, to = from.from()](rpc::Agent::Answer*, const rpc::CallFailure* failure) {
                   if (failure != nullptr) fail(pass, NodeFailure::of(to, *failure));
                 });
}

void AutogradService::serve_gradients(rpc::Request request) {
  std::shared_ptr<Pass> pass;
  bool start = false;
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto message = need(reader.get<std::uint64_t>());
    if (is_over(head.pass)) {  // whoever ended it has sent the origin the reason
      request.answer({});
      return;
    }
    pass = enter(head);
    start = pass->take(
        message, lockstep::decode<variable_list>(request.body().subspan(reader.position()), request.blobs()));
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
    return;
  }
  if (!start) return;
  request.release();
  // A thread that helps while it waits for something else must not run a whole part: it may hold locks, and
  // the part may take long.
  if (rpc::Agent::helping()) {
    agent_.run([this, pass] { run_part(pass); });
  } else {
    run_part(pass);
  }
}

// leave() before the report: once the origin has all reports its caller may start the next pass, which must
// find the context free.
void AutogradService::run_part(const std::shared_ptr<Pass>& pass) {
  try {
    pass->run();
  } catch (...) {
    fail(pass, NodeFailure::of(self(), rpc::current_call_failure()));
  }
  leave(pass);
  if (!pass->failed()) tell_origin(*pass, nullptr);
}

void AutogradService::leave(const std::shared_ptr<Pass>& pass) {
  {
    const std::lock_guard lock(mutex_);
    over_.add(pass->head().pass);
  }
  pass->context().leave(*pass);
}

void AutogradService::tell_origin(const Pass& pass, const NodeFailure* failure) {
  auto writer = with_head(pass);
  if (failure != nullptr) {
    writer.put(kFailed);
    failure->write(writer);
  } else {
    writer.put(kOk);
    write_workers(writer, pass.sent_to());
  }
  // An origin that cannot be reached is gone, and on_lost knows it.
  agent_.request(pass.head().origin, rpc::MessageKind::kBackwardDone, {.body = writer.take()},
                 agent_.rpc_timeout(), "the end of a backward pass",
                 [](rpc::Agent::Answer*, const rpc::CallFailure*) {});
}

void AutogradService::serve_done(rpc::Request request) {
  try {
    base::ByteReader reader(request.body());
    const auto head = PassHead::read(reader);
    const auto state = find(head.context);
    const auto pass = state ? state->pass() : nullptr;
    if (pass && pass->head().pass == head.pass && pass->is_origin()) {
      if (need(reader.get<std::uint8_t>()) == kOk) {
        const auto workers = read_workers(reader);
        pass->report(request.from(), workers);
        check_present(pass, workers);
      } else {
        pass->fail(NodeFailure::read(reader));
      }
    }
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
  }
}

// Failures.

// Only the first failure of a pass is passed on (pass->fail), so messages about one failure do not circulate.
void AutogradService::fail(const std::shared_ptr<Pass>& pass, NodeFailure failure) {
  if (!pass->fail(failure) || pass->is_origin()) return;
  if (!pass->running()) leave(pass);
  tell_origin(*pass, &failure);
  // Those it notified are not all known to the origin.
  abort_others(*pass, [] {});
}

void AutogradService::check_present(const std::shared_ptr<Pass>& pass, const std::vector<WorkerId>& workers) {
  for (const auto worker : workers) {
    try {
      agent_.find(rpc::Worker(int{worker}));
    } catch (const Error&) {
      pass->fail(NodeFailure::of(worker, rpc::current_call_failure()));
      return;
    }
  }
}

void AutogradService::abort_others(const Pass& pass, const std::function<void()>& done) {
  auto workers = pass.told();
  // Not the origin: it is notified of the failure and gives up by itself, and an abort must not overtake the
  // cause.
  std::erase(workers, pass.head().origin);
  if (workers.empty()) {
    done();
    return;
  }
  const auto n_left = std::make_shared<std::atomic<std::size_t>>(workers.size());
  for (const auto worker : workers) {
    agent_.request(worker, rpc::MessageKind::kBackwardAbort, {.body = with_head(pass).take()}, kGiveUp,
                   "the end of a failed backward pass",
                   [n_left, done](rpc::Agent::Answer*, const rpc::CallFailure*) {
                     if (n_left->fetch_sub(1) == 1) done();
                   });
  }
}

void AutogradService::serve_abort(rpc::Request request) {
  const auto shared = std::make_shared<rpc::Request>(std::move(request));
  try {
    base::ByteReader reader(shared->body());
    const auto head = PassHead::read(reader);
    {
      const std::lock_guard lock(mutex_);
      over_.add(head.pass);
    }
    const auto state = find(head.context);
    const auto pass = state ? state->pass() : nullptr;
    // False when it failed before, also by an abort that went round in a circle.
    const bool mine =
        pass && pass->head().pass == head.pass &&
        pass->fail({.worker = head.origin,
                    .failure = {.kind = ErrorKind::kAborted, .message = "the backward pass was aborted"},
                    .type = "lockstep::Error"});
    if (!mine) {
      shared->answer({});
      return;
    }
    if (!pass->running()) leave(pass);
    abort_others(*pass, [shared] { shared->answer({}); });
  } catch (...) {
    shared->answer_failure(rpc::current_call_failure());
  }
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
