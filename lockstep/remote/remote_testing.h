// For tests of lockstep/remote with workers as threads.
#pragma once

#include <functional>

#include "lockstep/autograd/autograd.h"
#include "lockstep/remote/init_rpc.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc::testing {

inline WorkersOptions with_remote() {
  return {.extensions = {autograd::extension, remote_extension}};
}

// `fn` on worker 0 of n.
inline void on_first(int n, const std::function<void()>& fn) {
  run_workers(
      n,
      [&](int rank, Workers&) {
        if (rank == 0) fn();
      },
      with_remote());
}

}  // namespace lockstep::rpc::testing
