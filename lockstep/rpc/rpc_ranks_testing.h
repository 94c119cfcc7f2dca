// For tests of RPC groups: workers as rank threads over a store.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/store/hash_store.h"

namespace lockstep::rpc::testing {

// Each thread is a rank; throws again what the first one threw.
inline void as_ranks(int n, const std::function<void(int, std::shared_ptr<Store>)>& fn) {
  const auto store = std::make_shared<HashStore>();
  std::mutex mutex;
  std::exception_ptr first;
  {
    std::vector<base::Thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back("rank " + std::to_string(rank), [&, rank] {
        base::RankThread self;
        const base::RankThreadScope scope(&self);
        try {
          fn(rank, store->clone());
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
      });
    }
  }
  if (first) std::rethrow_exception(first);
}

inline std::string name_of(int rank) {
  return "worker" + std::to_string(rank);
}

}  // namespace lockstep::rpc::testing
