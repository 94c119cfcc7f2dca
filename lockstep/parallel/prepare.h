// What a module of your own calls at the beginning and at the end of its forward, so that a plan can place
// its arguments and results. Without a plan both return what they are given.
//
//   at::Tensor forward(at::Tensor x) {
//     x = lockstep::prepare_inputs(*this, {x})[0];
//     ...
//     return lockstep::prepare_outputs(*this, {y})[0];
//   }
//
// Thread safety: any thread.
#pragma once

#include <torch/nn/module.h>

#include <vector>

namespace lockstep {

// As PrepareModuleInput says for this module. kUsage when the plan has another number of arguments.
std::vector<at::Tensor> prepare_inputs(const torch::nn::Module& module, std::vector<at::Tensor> inputs);
// As PrepareModuleOutput says.
std::vector<at::Tensor> prepare_outputs(const torch::nn::Module& module, std::vector<at::Tensor> outputs);

}  // namespace lockstep
