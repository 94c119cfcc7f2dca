// Ranks of the host engine for its tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "lockstep/engine/test_world.h"
#include "lockstep/host/host.h"

namespace lockstep::comm::testing {

class Rank : public EngineRank {
 public:
  Rank(const lockstep_host* host, int rank, int size, Milliseconds timeout = Milliseconds(20'000))
      : EngineRank(engine(), host, rank, size, {.timeout = timeout}) {}
  static const lockstep_engine& engine() { return *host_engine(); }
};

// Runs body(rank) on one thread per rank.
inline void with_threads(int size, const std::function<void(Rank&)>& body) {
  MapKv kv;
  const KvSpace space(kv);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(space.host(), r, size);
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace lockstep::comm::testing
