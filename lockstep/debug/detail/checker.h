// Compares the collectives that the ranks of a group are about to run. For group/.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/debug/detail/store_gather.h"

namespace lockstep::internal {

// One collective on one rank, as text: equal on all ranks when they run the same. An empty shape is not
// compared.
struct Fingerprint {
  std::string operation{}, sequence{}, n_tensors{}, dtypes{}, devices{}, shapes{};

  // "all_reduce, sequence number 3, 1 tensor(s), dtypes float, device types cpu, shapes [2, 3]"
  std::string text() const;
  std::string encode() const;
  static Fingerprint decode(const std::string& text);
  // "" when equal; otherwise the aspects that differ, "sequence number: 3 vs 4".
  std::string differences(const Fingerprint& other) const;
};

// Thread safety: every method may be called from any thread; all ranks must call in the same order.
class Checker {
 public:
  // `store`: a part of the store reserved for the checker. `ranks` of the world.
  Checker(Store& store, int rank, std::vector<int> ranks);

  // Synchronises with the other ranks. Raises, on every rank that arrived, kTimeout with the missing ranks
  // and the fingerprint, or kUsage with both fingerprints when another rank runs something else. The message
  // begins with `who`. `still_worth_it` as in StoreGather.
  void check(const std::string& who, const Fingerprint& mine, Milliseconds timeout,
             const std::function<void()>& still_worth_it);

 private:
  const int rank_;
  const std::vector<int> ranks_;
  base::Mutex mutex_;
  StoreGather gather_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t number_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // number of the next gather
};

}  // namespace lockstep::internal
