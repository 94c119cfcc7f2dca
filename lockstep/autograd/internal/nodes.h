// The two ends of a message in the autograd graph. Tensors that were sent together share a send node on the
// sender's side and a recv node on the receiver's, which know each other by the message's id. In a backward
// pass gradients go from recv to send.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/rpc/device_map.h"
#include "lockstep/rpc/worker.h"
#include "lockstep/tensor/torch_compat.h"

namespace lockstep::autograd::internal {

using rpc::WorkerId;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

// Hands the gradients that came back on to where the sent tensors came from. Held by the context.
class SendNode final : public torch::autograd::Node {
 public:
  static compat::NodeOwner<SendNode> make(WorkerId to, std::uint64_t message,
                                          const std::vector<at::Tensor>& tensors);

  WorkerId to() const { return to_; }
  std::uint64_t message() const { return message_; }
  std::size_t n_tensors() const { return n_tensors_; }
  // Went through a pass that did not retain the graph: the graph behind it is let go of.
  bool used_up() const { return used_up_.load(); }
  // A pass is going through it that will: no other may begin.
  void mark_used() { used_up_ = true; }
  void use_up();
  std::string name() const override { return "lockstep::SendNode"; }

 protected:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }

 private:
  SendNode(WorkerId to, std::uint64_t message, edge_list&& edges);
  const WorkerId to_;
  const std::uint64_t message_;
  const std::size_t n_tensors_;
  std::atomic<bool> used_up_{false};
};

// Sends the gradients of received tensors to the worker they came from. Held by the tensors.
class RecvNode final : public torch::autograd::Node {
 public:
  // `leg`: of the call in which the tensors came.
  static compat::NodeOwner<RecvNode> make(std::uint64_t context, WorkerId from, std::uint64_t message,
                                          rpc::Leg leg);

  std::uint64_t context() const { return context_; }
  WorkerId from() const { return from_; }
  std::uint64_t message() const { return message_; }
  rpc::Leg leg() const { return leg_; }
  std::string name() const override { return "lockstep::RecvNode"; }

 protected:
  // Through the pass that this thread runs; raises kUsage in an ordinary backward().
  variable_list apply(variable_list&& gradients) override;

 private:
  RecvNode(std::uint64_t context, WorkerId from, std::uint64_t message, rpc::Leg leg);
  const std::uint64_t context_;
  const WorkerId from_;
  const std::uint64_t message_;
  const rpc::Leg leg_;
};

}  // namespace lockstep::autograd::internal
