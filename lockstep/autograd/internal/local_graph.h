// One worker's part of a backward pass: which nodes take part, how many gradients each waits for, and running
// them.
//
// libtorch's engine does this for whole graphs; its parts that could be made to wait for more gradients are
// not exported. So this runs the nodes, inside a node of ours that the engine runs (run_in_engine): hooks
// find themselves in an ordinary pass, may queue callbacks for its end, and the engine's thread-local
// settings hold.
// Gradients of leaves go to the context, never to Tensor::grad().
// A node whose inputs are on a GPU runs in the stream of its forward operation, as in libtorch's engine, and is ordered
// after what made its gradients; nodes of the CPU follow on the same thread.
// Thread safety: none; the pass takes care. Ownership: nodes are the graph's, held by roots and send nodes;
// those that are ready or run, also by this.
#pragma once

#include <torch/csrc/autograd/input_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

#include "lockstep/autograd/internal/nodes.h"
#include "lockstep/tensor/torch_compat.h"

namespace lockstep::autograd::internal {

class ContextState;

class LocalGraph {
 public:
  LocalGraph(ContextState& context, bool retain_graph) : context_(context), retain_graph_(retain_graph) {}

  // Everything behind it takes part. A root waits for one gradient more, of deliver; a send node for those of
  // start. Raises kUsage where a tensor of another context is met.
  void enter_root(const torch::autograd::Edge& root);
  void enter_send(SendNode& send);
  // The recv nodes met since it was last asked.
  std::vector<const RecvNode*> take_reached();

  void deliver(const torch::autograd::Edge& to, at::Tensor gradient);
  void start(SendNode& send, variable_list gradients);
  bool idle() const { return ready_.empty(); }
  // The calling thread's current streams are ordered after the leaves that ran.
  void join_streams();
  // Runs the ready node that was made last, its hooks included. Pre: !idle(). Throws what it throws.
  void run_one();

 private:
  using Node = torch::autograd::Node;
  struct State {
    int n_missing = 0;  // gradients that have yet to come
    std::optional<torch::autograd::InputBuffer> gradients{};
  };
  struct Ready {
    // Shared: a pass that was given up may still run one while another pass lets go of the graph.
    compat::NodePtr node;
    torch::autograd::InputBuffer gradients;
    // Of a heap whose top is the one made last.
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.node->sequence_nr() < b.node->sequence_nr();
    }
  };
  void walk(Node& from);
  // `stream`: in which `gradient` was made; unset: the current one of its device.
  void deliver_from(const std::optional<c10::Stream>& stream, const torch::autograd::Edge& to,
                    at::Tensor gradient);
  void push(compat::NodePtr node, torch::autograd::InputBuffer gradients);
  variable_list call(Node& node, variable_list gradients);

  ContextState& context_;
  const bool retain_graph_;
  std::unordered_map<Node*, State> states_;
  std::vector<const RecvNode*> reached_;
  std::vector<Ready> ready_;  // a heap
  std::vector<c10::Stream> leaf_streams_;
};

// Calls `body` inside a pass of libtorch's engine, on this thread. Callbacks that it queues run after it.
// Throws what it throws.
void run_in_engine(const std::function<void()>& body);
// The calling thread is inside run_in_engine.
bool in_engine_pass() noexcept;

}  // namespace lockstep::autograd::internal
