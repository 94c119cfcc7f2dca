// Cross entropy over logits whose classes are sharded: torch's loss_parallel.
//
//   const auto logits = at::linear(x, embedding->weight);       // [n, classes], Shard(1)
//   const LossParallelScope scope;
//   auto loss = at::cross_entropy_loss(logits, targets);        // targets: plain, equal on all ranks
//   loss.backward();
//
// In torch the scope replaces operators; here they need no replacing: the softmax exchanges one maximum and
// one sum per row, a row's loss is found by the rank that has its class, and the result is replicated, inside
// a scope and outside. What the scope adds: plain tensors beside DTensors count as replicas (targets and
// class weights, as with ImplicitReplicationScope), and a loss that would gather its classes raises
// kUnsupported before anything is sent, so that a vocabulary is never gathered by accident. Class weights,
// ignore_index, label_smoothing and targets of probabilities work; torch refuses the last two. Thread safety:
// belongs to the thread that opens it; scopes nest and close in the reverse order.
#pragma once

#include "lockstep/dtensor/dtensor.h"

namespace lockstep {

class LossParallelScope {
 public:
  LossParallelScope();
  ~LossParallelScope();
  LossParallelScope(const LossParallelScope&) = delete;
  LossParallelScope& operator=(const LossParallelScope&) = delete;

 private:
  const ImplicitReplicationScope targets_;
  const bool before_;
};

}  // namespace lockstep
