#include "lockstep/autograd/internal/nodes.h"

#include <limits>

#include "lockstep/autograd/internal/pass.h"

namespace lockstep::autograd::internal {

SendNode::SendNode(WorkerId to, std::uint64_t message, edge_list&& edges)
    : Node(std::move(edges)), to_(to), message_(message), n_tensors_(next_edges().size()) {}

compat::NodeOwner<SendNode> SendNode::make(WorkerId to, std::uint64_t message,
                                           const std::vector<at::Tensor>& tensors) {
  return compat::own_node(new SendNode(to, message, torch::autograd::collect_next_edges(tensors)));
}

// The edges hold the graph behind the node, and with it saved tensors: dropped as soon as a pass has used
// them.
void SendNode::use_up() {
  used_up_ = true;
  next_edges().clear();
}

// Ready gradients travel before anything else is computed.
RecvNode::RecvNode(std::uint64_t context, WorkerId from, std::uint64_t message, rpc::Leg leg)
    : Node(std::numeric_limits<std::uint64_t>::max()),
      context_(context),
      from_(from),
      message_(message),
      leg_(leg) {}

compat::NodeOwner<RecvNode> RecvNode::make(std::uint64_t context, WorkerId from, std::uint64_t message,
                                           rpc::Leg leg) {
  return compat::own_node(new RecvNode(context, from, message, leg));
}

variable_list RecvNode::apply(variable_list&& gradients) {
  Pass::here().send_gradients(*this, std::move(gradients));
  return {};
}

}  // namespace lockstep::autograd::internal
