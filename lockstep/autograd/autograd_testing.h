// For tests of distributed autograd with workers as threads.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/autograd/autograd.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::autograd::testing {

// rpc::testing::run_workers with distributed autograd.
inline void run_workers(int n, const std::function<void(int, rpc::testing::Workers&)>& fn,
                        rpc::testing::WorkersOptions options = {}) {
  options.extensions.push_back(extension);
  rpc::testing::run_workers(n, fn, options);
}

inline int self() {
  return rpc::current_agent("test")->self().id;
}
inline at::Tensor ones_with_grad() {
  return at::ones({3}).set_requires_grad(true);
}

inline std::string n_contexts(const rpc::Agent& agent) {
  return agent.debug_info().at("num_autograd_contexts");
}
inline std::string n_passes(const rpc::Agent& agent) {
  return agent.debug_info().at("num_current_backward_passes");
}

// Requests of the agent that have not been answered.
inline std::string n_waiting(const rpc::Agent& agent) {
  return agent.debug_info().at("agent.num_pending_requests");
}

// Wait until every live worker has released every pass; and, the second, every context.
inline void await_no_pass(const rpc::testing::Workers& workers, int gone = -1) {
  for (const auto& agent : workers.agents) {
    if (agent->self().id == gone) continue;
    rpc::testing::until([&] { return n_passes(*agent) == "0"; }, agent->self().name + " keeps a pass");
  }
}
inline void await_released(const rpc::testing::Workers& workers, int gone = -1) {
  await_no_pass(workers, gone);
  for (const auto& agent : workers.agents) {
    if (agent->self().id == gone) continue;
    rpc::testing::until([&] { return n_contexts(*agent) == "0"; }, agent->self().name + " keeps a context");
  }
}

// What happens on the worker in trouble when a gradient comes to it from the worker that called it, and when
// one is about to leave it for that worker. Empty: nothing.
struct Trouble {
  std::function<void()> coming{};
  std::function<void()> leaving{};
};
inline Trouble trouble;
constexpr int kNone = -1;

// x * 2 here, then on the workers of `path`, one called by the other; answered through all of them.
// autograd_failure_test.cpp registers it.
inline at::Tensor pass_on(const at::Tensor& x, const std::vector<int>& path, int in_trouble) {
  const auto hook = [&](const at::Tensor& tensor, std::function<void()> Trouble::*what) {
    if (self() != in_trouble) return;
    tensor.register_hook([what](const at::Tensor& gradient) {
      if (trouble.*what) (trouble.*what)();
      return gradient;
    });
  };
  auto y = x * 2;
  hook(y, &Trouble::leaving);
  if (!path.empty()) {
    y = rpc::rpc_sync(path[0], pass_on, {y, std::vector<int>(path.begin() + 1, path.end()), in_trouble});
  }
  const auto answer = y * 1;
  hook(answer, &Trouble::coming);
  return answer;
}

}  // namespace lockstep::autograd::testing
