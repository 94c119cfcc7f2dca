// Contexts, and what calls carry along.
#include "lockstep/autograd/internal/service.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::autograd::internal {
namespace {

// Over hours, as for RRefs: a context that is not released keeps its graph and gradients.
constexpr int kCleanupTries = 20;
constexpr int kWorkerShift = 48;

WorkerId owner_of(std::uint64_t context) {
  return static_cast<WorkerId>(context >> kWorkerShift);
}

// Collects what is sent.
class Sent final : public object::TensorScope {
 public:
  void on_write(const at::Tensor& tensor) override { tensors.push_back(tensor); }
  void on_read(at::Tensor&) override {}
  std::vector<at::Tensor> tensors;
};

// Connects what is received.
class Received final : public object::TensorScope {
 public:
  explicit Received(compat::NodeOwner<RecvNode> node) : node_(std::move(node)) {}
  void on_write(const at::Tensor&) override {}
  void on_read(at::Tensor& tensor) override { torch::autograd::set_history(tensor, node_); }
  std::size_t n_tensors() const { return node_->num_inputs(); }

 private:
  const compat::NodeOwner<RecvNode> node_;
};

// Nodes that run an engine pass of their own must know that they are inside one of ours: theirs would fill
// Tensor::grad(). Calls made inside a context find its gradients, wherever they run: the context's number
// travels with the call.
class ContextGradients final : public GradientProvider {
 public:
  std::shared_ptr<GradientAccess> current() const override {
    const auto id = rpc::this_call().autograd_context;
    const auto agent = id == 0 ? nullptr : rpc::current_agent_if_any();
    return agent && !agent->closed() ? agent->service<AutogradService>().find_or_make(id) : nullptr;
  }
  bool in_backward() const noexcept override { return in_engine_pass(); }
};

}  // namespace

AutogradService::AutogradService(rpc::Agent& agent) : agent_(agent) {
  using rpc::MessageKind;
  using rpc::Request;
  using Runs = rpc::Agent::Runs;
  // Plans and gradients are kEither: they run where they are found, and check helping() before anything that
  // may block.
  agent.set_extension(this);
  agent.handle(
      MessageKind::kBackwardPlan, [this](Request request) { serve_plan(std::move(request)); }, Runs::kEither);
  agent.handle(
      MessageKind::kBackward, [this](Request request) { serve_gradients(std::move(request)); },
      Runs::kEither);
  agent.handle(
      MessageKind::kBackwardDone, [this](Request request) { serve_done(std::move(request)); }, Runs::kQuick);
  agent.handle(MessageKind::kBackwardAbort, [this](Request request) { serve_abort(std::move(request)); });
  agent.handle(MessageKind::kCleanup, [this](Request request) { serve_cleanup(std::move(request)); });
  agent.handle(MessageKind::kContextHeld, [this](Request request) { serve_held(std::move(request)); });
}

// Contexts.

std::uint64_t AutogradService::open_context() {
  const auto id = agent_.new_id();
  const std::lock_guard lock(mutex_);
  contexts_.emplace(id, std::make_shared<ContextState>(id));
  return id;
}

std::shared_ptr<ContextState> AutogradService::find(std::uint64_t context) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(context);
  return found == contexts_.end() ? nullptr : found->second;
}

// A context is made on any worker that first gets a message of it, in whatever order messages arrive. Not for
// one's own: its id exists only after open_context(). Not for one that was released or whose owner is lost:
// nobody would ever release it again.
std::shared_ptr<ContextState> AutogradService::find_or_make(std::uint64_t context) {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(context);
  if (found != contexts_.end()) return found->second;
  if (closed_ || owner_of(context) == self() || released_.contains(context) ||
      lost_.contains(owner_of(context))) {
    return nullptr;
  }
  return contexts_.emplace(context, std::make_shared<ContextState>(context)).first->second;
}

// Spreads along the workers that each worker has exchanged messages with, not from a central list: a context
// may have reached workers that its owner has no record of. released_ makes the second notice end here.
void AutogradService::release(std::uint64_t context, std::optional<WorkerId> told_by) {
  std::shared_ptr<ContextState> state;
  {
    const std::lock_guard lock(mutex_);
    released_.add(context);
    const auto found = contexts_.find(context);
    if (found == contexts_.end()) return;
    state = std::move(found->second);
    contexts_.erase(found);
  }
  if (const auto pass = state->pass()) {
    pass->fail({.worker = self(),
                .failure = {.kind = ErrorKind::kAborted, .message = "the autograd context was released"},
                .type = "lockstep::Error"});
    if (!pass->running()) leave(pass);  // the context and its pass hold each other
  }
  for (const auto worker : state->workers()) {
    if (worker != told_by) tell_release(context, worker);
  }
}

void AutogradService::tell_release(std::uint64_t context, WorkerId worker) {
  if (worker == self() || worker == owner_of(context)) return;
  base::ByteWriter writer;
  writer.put(context);
  // Nobody waits: a worker that is gone has nothing to release, and one that is late is asked again.
  agent_.request_again(worker, rpc::MessageKind::kCleanup, {.body = writer.take()},
                       "the release of an autograd context", kCleanupTries);
}

void AutogradService::serve_cleanup(rpc::Request request) {
  try {
    base::ByteReader reader(request.body());
    const auto context = need(reader.get<std::uint64_t>());
    release(context, request.from());
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
  }
}

// A worker that is lost cannot pass the release on to those behind it. The owner is then notified of this
// worker, and releases it directly.
void AutogradService::note_worker(ContextState& state, WorkerId worker) {
  if (!state.note_worker(worker)) return;
  bool lost = false;
  {
    const std::lock_guard lock(mutex_);
    lost = lost_.contains(worker);
  }
  if (lost) tell_owner(state.id());
}

void AutogradService::tell_owner(std::uint64_t context) {
  if (owner_of(context) == self()) return;
  base::ByteWriter writer;
  writer.put(context);
  agent_.request_again(owner_of(context), rpc::MessageKind::kContextHeld, {.body = writer.take()},
                       "a notice to the owner of an autograd context", kCleanupTries);
}

void AutogradService::serve_held(rpc::Request request) {
  try {
    base::ByteReader reader(request.body());
    const auto context = need(reader.get<std::uint64_t>());
    const auto state = find(context);
    if (state) state->note_worker(request.from());
    // Looked up again after the worker was noted: a release that ran in between did not see it.
    if (!state || find(context) != state) tell_release(context, request.from());
    request.answer({});
  } catch (...) {
    request.answer_failure(rpc::current_call_failure());
  }
}

// A copy of the list: release() and fail() take mutex_ and send messages, so neither may run under it.
void AutogradService::on_lost(WorkerId peer, const std::string& cause) {
  std::vector<std::shared_ptr<ContextState>> contexts;
  {
    const std::lock_guard lock(mutex_);
    lost_.insert(peer);
    for (const auto& [id, state] : contexts_) contexts.push_back(state);
  }
  for (const auto& state : contexts) {
    if (owner_of(state->id()) == peer) {
      release(state->id(), peer);
      continue;
    }
    if (state->has_worker(peer)) tell_owner(state->id());
    const auto pass = state->pass();
    if (!pass) continue;
    const NodeFailure lost{.worker = peer,
                           .failure = {.kind = ErrorKind::kPeerLost,
                                       .message = base::cat("worker ", name_of(peer), " is gone: ", cause),
                                       .peer = LostPeer{.rank = peer, .cause = cause}},
                           .type = "lockstep::Error"};
    if (pass->head().origin == peer) {
      pass->fail(lost);
      if (!pass->running()) leave(pass);
    } else if (pass->involves(peer)) {
      fail(pass, lost);
    }
  }
}

void AutogradService::on_joined(WorkerId peer) {
  const std::lock_guard lock(mutex_);
  lost_.erase(peer);
}

void AutogradService::debug_info(std::map<std::string, std::string>& info) {
  const std::lock_guard lock(mutex_);
  const auto n_passes =
      std::ranges::count_if(contexts_, [](const auto& entry) { return entry.second->pass() != nullptr; });
  info["num_autograd_contexts"] = std::to_string(contexts_.size());
  info["num_current_backward_passes"] = std::to_string(n_passes);
}

void AutogradService::on_close() {
  std::unordered_map<std::uint64_t, std::shared_ptr<ContextState>> contexts;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    // closed_ and the swap in one step: find_or_make() makes none afterwards.
    contexts.swap(contexts_);
  }
  for (const auto& [id, state] : contexts) {
    if (const auto pass = state->pass()) {
      pass->fail({.worker = self(),
                  .failure = {.kind = ErrorKind::kAborted, .message = "the RPC agent was shut down"},
                  .type = "lockstep::Error"});
      if (!pass->running()) leave(pass);
    }
  }
}

// Calls. What travels along: u64 message, u32 n_tensors; nothing when no tensor requires gradients.

Bytes AutogradService::encode(std::uint64_t context, WorkerId to, const std::function<void()>& encode) {
  const auto state = find_or_make(context);
  if (!state) {
    // Released meanwhile: tensors are sent without history, and the callee must not keep the context.
    encode();
    tell_release(context, to);
    return {};
  }
  note_worker(*state, to);
  Sent sent;
  {
    const object::TensorScope::Use use(&sent);
    encode();
  }
  // Released while it was encoded: the workers that were notified then did not include this one.
  if (find(context) != state) tell_release(context, to);
  if (sent.tensors.empty()) return {};
  const auto message = agent_.new_id();
  state->add_send(SendNode::make(to, message, sent.tensors));
  base::ByteWriter writer;
  writer.put(message).put(static_cast<std::uint32_t>(sent.tensors.size()));
  return writer.take();
}

void AutogradService::decode(std::uint64_t context, WorkerId from, rpc::Leg leg,
                             std::span<const std::uint8_t> extension_bytes,
                             const std::function<void()>& decode) {
  base::ByteReader reader(extension_bytes);
  const auto message = need(reader.get<std::uint64_t>());
  const auto n = need(reader.get<std::uint32_t>());
  if (reader.left() != 0 || context == 0) raise_damaged();
  const auto state = find_or_make(context);
  if (!state) {
    decode();
    return;
  }
  note_worker(*state, from);
  Received received(RecvNode::make(context, from, message, leg));
  {
    const object::TensorScope::Use use(&received);
    decode();
  }
  if (received.n_tensors() != n) {
    base::raise(ErrorKind::kUsage, base::cat(received.n_tensors(),
                                             " tensors that require gradients arrived, ", n, " were sent"));
  }
}

std::string AutogradService::name_of(WorkerId worker) const {
  return agent_.info(worker).name;  // also of one that is gone
}

}  // namespace lockstep::autograd::internal

std::unique_ptr<lockstep::rpc::Service> lockstep::autograd::extension(rpc::Agent& agent) {
  // Without state and never removed: it answers by the calling thread's agent, and without one "no context".
  static const internal::ContextGradients gradients;
  set_gradient_provider(&gradients);
  return std::make_unique<internal::AutogradService>(agent);
}
