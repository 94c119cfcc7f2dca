#include "lockstep/autograd/internal/local_graph.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "lockstep/autograd/internal/context_state.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::autograd::internal {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::InputBuffer;

namespace {

// Of the forward operation. Asked only where libtorch has GPUs: its own question for them is answered once for ever.
std::optional<c10::Stream> stream_of(torch::autograd::Node& node) {
  return lockstep::internal::device_count(c10::kCUDA) > 0 ? node.stream() : std::nullopt;
}

// What InputBuffer::add left to be waited for before the gradients are used in `stream`.
void await_ready(const InputBuffer& inputs, const std::optional<c10::Stream>& stream) {
  for (std::size_t i = 0; i < inputs.ready_events.size(); ++i) {
    if (!inputs.ready_events[i] || !inputs.buffer[i].defined()) continue;
    const c10::Stream consumer =
        stream ? *stream : lockstep::internal::current_stream(inputs.buffer[i].device());
    if (inputs.ready_streams[i] && *inputs.ready_streams[i] == consumer) continue;
    inputs.ready_events[i]->block(consumer);
  }
}

}  // namespace

// A root may be entered twice (two losses with one node): its gradients add up, so each entry counts.
void LocalGraph::enter_root(const Edge& root) {
  const auto [state, fresh] = states_.try_emplace(root.function.get());
  ++state->second.n_missing;
  if (fresh) walk(*root.function);
}

// Nothing is counted for the node itself: its gradients come from outside, through start().
void LocalGraph::enter_send(SendNode& send) {
  if (states_.try_emplace(&send).second) walk(send);
}

// Counts, for every node, how many gradients will reach it; libtorch's engine does the same
// (compute_dependencies). A node that was seen is counted again but not walked again. Iterative: graphs are
// deep.
void LocalGraph::walk(Node& from) {
  std::vector<Node*> open{&from};
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (const auto* recv = dynamic_cast<const RecvNode*>(node)) {
      if (recv->context() != context_.id()) {
        base::raise(ErrorKind::kUsage,
                    base::cat("the roots depend on a tensor that was received in autograd context ",
                              recv->context(), ", and this pass is of context ", context_.id()));
      }
      reached_.push_back(recv);
    }
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto [state, fresh] = states_.try_emplace(edge.function.get());
      ++state->second.n_missing;
      if (fresh) open.push_back(edge.function.get());
    }
  }
}

std::vector<const RecvNode*> LocalGraph::take_reached() {
  return std::exchange(reached_, {});
}

void LocalGraph::deliver(const Edge& to, at::Tensor gradient) {
  deliver_from(std::nullopt, to, std::move(gradient));
}

void LocalGraph::deliver_from(const std::optional<c10::Stream>& stream, const Edge& to, at::Tensor gradient) {
  Node& node = *to.function;
  const auto found = states_.find(&node);
  // A node whose hooks add edges while the pass runs.
  if (found == states_.end()) base::raise(ErrorKind::kUsage, "the graph changed during a backward pass");
  State& state = found->second;
  if (!state.gradients) state.gradients.emplace(node.num_inputs());
  // Adds up, as libtorch's InputBuffer does, which orders the streams of GPU tensors.
  state.gradients->add(to.input_nr, std::move(gradient), stream, stream_of(node), &node);
  if (--state.n_missing > 0) return;
  InputBuffer gradients = std::move(*state.gradients);
  state.gradients.reset();
  push(to.function, std::move(gradients));
}

void LocalGraph::start(SendNode& send, variable_list gradients) {
  push(send.getptr(), InputBuffer(std::move(gradients)));
}

// A heap by sequence number, highest first: later forward operations run first, as in libtorch's engine.
void LocalGraph::push(compat::NodePtr node, InputBuffer gradients) {
  ready_.push_back({.node = std::move(node), .gradients = std::move(gradients)});
  std::push_heap(ready_.begin(), ready_.end());
}

// Released right after it ran, not at the end: memory peaks as in libtorch.
void LocalGraph::run_one() {
  std::pop_heap(ready_.begin(), ready_.end());
  Ready next = std::move(ready_.back());
  ready_.pop_back();
  Node& node = *next.node;
  const auto stream = stream_of(node);
  const c10::OptionalStreamGuard in_stream(stream);
  await_ready(next.gradients, stream);
  variable_list results = call(node, std::move(next.gradients.buffer));
  if (stream && node.next_edges().empty() && std::ranges::find(leaf_streams_, *stream) == leaf_streams_.end())
    leaf_streams_.push_back(*stream);
  if (!retain_graph_) node.release_variables();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Edge& edge = node.next_edge(i);
    if (edge.is_valid()) deliver_from(stream, edge, std::move(results[i]));
  }
}

// As libtorch's engine at the end of a pass: gradients are complete in the streams of whoever started it.
void LocalGraph::join_streams() {
  for (const auto& leaf : std::exchange(leaf_streams_, {})) {
    lockstep::internal::order(leaf, lockstep::internal::current_stream(leaf.device()));
  }
}

// What surrounds a node in libtorch's engine, in the same order.
variable_list LocalGraph::call(Node& node, variable_list gradients) {
  // Hooks on tensors first, then those that retain a gradient, then those on the node: a retained gradient is
  // what the tensor hooks made of it.
  for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
  for (const auto& [index, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
  for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
  variable_list results;
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(&node)) {
    if (gradients.at(0).defined()) context_.accumulate(leaf->variable, gradients[0]);
    for (const auto& hook : node.post_hooks()) results = (*hook)(results, gradients);
    return {};
  }
  if (!retain_graph_) node.will_release_variables();
  const bool hooked = !node.post_hooks().empty();
  const variable_list before = hooked ? gradients : variable_list{};
  results = node(std::move(gradients));
  torch::autograd::validate_outputs(node.next_edges(), results, [&](const std::string& message) {
    return base::cat("Function ", node.name(), " returned an ", message);
  });
  for (const auto& hook : node.post_hooks()) results = (*hook)(results, before);
  return results;
}

namespace {

thread_local int n_drivers = 0;  // on this thread's stack

class Driver final : public torch::autograd::Node {
 public:
  explicit Driver(const std::function<void()>& body) : body_(body) {}
  std::string name() const override { return "lockstep::Driver"; }

 protected:
  variable_list apply(variable_list&&) override {
    struct Running {
      Running() { ++n_drivers; }
      ~Running() { --n_drivers; }
    } const running;
    body_();
    return {};
  }

 private:
  const std::function<void()>& body_;
};

}  // namespace

// The body runs inside Engine::execute, so that what libtorch does around a pass (callbacks at its end, the
// graph task of this thread, its exceptions) works as in any other. The one node is on the CPU, hence on the
// calling thread.
void run_in_engine(const std::function<void()>& body) {
  const auto driver = compat::own_node(new Driver(body));
  static const at::Tensor nothing = at::zeros({});
  driver->add_input_metadata(nothing);
  torch::autograd::Engine::get_default_engine().execute({Edge(driver, 0)}, {nothing}, /*keep_graph=*/true,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true);
}

bool in_engine_pass() noexcept {
  return n_drivers != 0;
}

}  // namespace lockstep::autograd::internal
