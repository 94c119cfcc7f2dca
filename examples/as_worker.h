// Shared by the examples of RPC: main's frame.
#pragma once

#include <lockstep/lockstep.h>

#include <cstdio>

// What main returns: 0 when body(rank) says that it worked. `rank` is the launcher's.
template <class Body>
int as_worker(Body body) {
  std::setvbuf(stdout, nullptr, _IOLBF,
               0);  // lines are seen when they are printed, also through the launcher
  const auto rank = lockstep::detect_cluster().rank;
  if (!rank) {
    std::fprintf(stderr, "there is no RANK: start this program with lockstep run\n");
    return 1;
  }
  // What it throws, such as that another worker is gone, is a line of this rank's.
  return lockstep::run_main([&] { return body(*rank) ? 0 : 1; });
}
