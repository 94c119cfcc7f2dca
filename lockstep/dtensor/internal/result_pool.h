// Memory for the results of redistributions that is used again. Large results live in memory that all ranks
// of the host reach (empty_shared), whose pages are new each time: taking 25 MiB of them costs several times
// the collective that fills them. A freed result is therefore kept for the next one of its size. Bounded;
// ends with the mesh's last tensor, when what is kept goes back to the system. Thread safety: every method
// may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/base/detail/forks.h"
#include "lockstep/group/process_group.h"

namespace lockstep::dtensor_internal {

class ResultPool {
 public:
  ResultPool() : state_(std::make_shared<State>()) {}

  // An uninitialised tensor on the CPU, in the group's shared memory when it is large and the group has any.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Group& group) const;

 private:
  // (group, bytes): memory of one group is of no use to another.
  using Key = std::pair<const void*, std::int64_t>;
  struct State {
    const base::MadeHere here{};  // a forked child has no pool: what is idle here is its parent's
    std::mutex mutex;
    std::map<Key, std::vector<at::Tensor>> idle;  // guarded by mutex, as bytes
    std::int64_t idle_bytes = 0;                  // guarded by mutex
  };
  static at::Tensor lend(const std::shared_ptr<State>& state, const Key& key, at::Tensor memory,
                         at::IntArrayRef sizes, at::ScalarType dtype);

  // Shared with the tensors that were lent, which may live longer than the pool.
  const std::shared_ptr<State> state_;
};

}  // namespace lockstep::dtensor_internal
