// For nodes that run an engine pass of their own.
#pragma once

namespace lockstep::autograd {

// This thread runs a node of autograd::backward: gradients belong to the context, and a pass of the node's own would put its into
// Tensor::grad().
bool in_pass() noexcept;

}  // namespace lockstep::autograd
