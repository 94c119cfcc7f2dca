// Shared by the examples of RPC: main's frame, so that a worker that fails says why in one line.
#pragma once

#include <lockstep/lockstep.h>

#include <cstdio>
#include <exception>

// What main returns: 0 when body(rank) says that it worked. `rank` is the launcher's.
template <class Body>
int as_worker(Body body) {
  std::setvbuf(stdout, nullptr, _IOLBF,
               0);  // lines are seen when they are printed, also through the launcher
  const auto rank = lockstep::environment_int(lockstep::Var::kRank);
  if (!rank) {
    std::fprintf(stderr, "there is no RANK: start this program with lockstep run\n");
    return 1;
  }
  try {
    return body(static_cast<int>(*rank)) ? 0 : 1;
  } catch (const std::exception& error) {  // such as: another worker is gone
    std::fprintf(stderr, "gives up: %s\n", error.what());
    return 1;
  }
}
