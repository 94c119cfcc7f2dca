// For tests of what lies on other workers, workers as threads.
#pragma once

#include <functional>

#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc::testing {

// `fn` on worker 0 of n.
inline void on_first(int n, const std::function<void()>& fn) {
  run_workers(n, [&](int rank, Workers&) {
    if (rank == 0) fn();
  });
}

}  // namespace lockstep::rpc::testing
