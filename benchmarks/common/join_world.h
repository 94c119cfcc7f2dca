// The default process group for forked ranks, over a store that rank 0 holds.
#pragma once

#include <string>

#include "benchmarks/common/link.h"
#include "benchmarks/common/open_store.h"
#include "lockstep/group/world.h"

namespace bench {

struct JoinOptions {
  std::string address = "127.0.0.1";  // of rank 0
  std::string backend{};              // as in InitOptions
};

inline void join_world(Link& link, const JoinOptions& join = {}) {
  lockstep::init_process_group({.backend = join.backend,
                                .world_size = link.size(),
                                .rank = link.rank(),
                                .store = open_store(link, join.address)});
}

}  // namespace bench
