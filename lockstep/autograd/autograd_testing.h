// For tests of distributed autograd with workers as threads.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::autograd::testing {

inline Failure caught(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.failure();
  }
  ADD_FAILURE() << "nothing was raised";
  return {};
}

inline bool says(const Failure& failure, const std::string& part) {
  return failure.message.find(part) != std::string::npos;
}

// Every worker that is there has let go of every context. Fails after ten seconds.
inline void await_released(const rpc::testing::Workers& workers, int gone = -1) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (const auto& agent : workers.agents) {
    if (agent->self().id == gone) continue;
    const auto open = [&] {
      const auto info = agent->debug_info();
      return info.at("num_autograd_contexts") != "0" || info.at("num_current_backward_passes") != "0";
    };
    while (open() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_FALSE(open()) << agent->self().name << " keeps a context";
  }
}

}  // namespace lockstep::autograd::testing
