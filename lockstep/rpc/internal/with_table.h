// How RRefManager changes its table.
// Thread safety: as rref_manager.h.
#pragma once

#include <type_traits>
#include <utility>

#include "lockstep/rpc/detail/rref_manager.h"
#include "lockstep/rpc/internal/rref_table.h"

namespace lockstep::rpc {

template <class Step>
auto RRefManager::with_table(Step&& step) {
  Actions actions;
  if constexpr (std::is_void_v<decltype(step(*table_, actions))>) {
    {
      const base::MutexLock lock(mutex_);
      step(*table_, actions);
      changed_.notify_all();
    }
    carry_out(std::move(actions));
  } else {
    auto result = [&] {
      const base::MutexLock lock(mutex_);
      auto value = step(*table_, actions);
      changed_.notify_all();
      return value;
    }();
    carry_out(std::move(actions));
    return result;
  }
}

}  // namespace lockstep::rpc
