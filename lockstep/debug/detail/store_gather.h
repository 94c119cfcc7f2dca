// A gather over a store: each rank of a group brings a few bytes, rank 0 collects them, decides, and tells everyone.
// Used to find out who is missing (monitored_barrier) and who does something else (the debug wrapper). For group/.
//
// Gathers are numbered; all ranks take part in all of them in order. A rank that comes late to one that failed learns
// why it failed. Keys of a gather are removed when all have come to the next one.
// Thread safety: one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/store/store.h"

namespace lockstep::internal {

class StoreGather {
 public:
  // `ranks`: of the world, for messages. Takes a handle of its own on the store, which it may block.
  StoreGather(Store& store, int rank, std::vector<int> ranks);

  struct Options {
    Milliseconds timeout;   // rank 0's patience
    Milliseconds patience;  // everyone else's
    bool name_all;          // every missing rank, not the first alone
    std::string who;        // begins every message
    // Asked now and then while waiting: raises when there is no point in going on. May be empty.
    std::function<void()> still_worth_it{};
    bool one_look = false;  // rank 0 does not wait; a timeout of zero alone means for ever
  };
  // Brings `mine`. Returns what rank 0's `decide` made of the words of all, in the order of ranks: "" is well, anything
  // else is up to the caller. Raises kTimeout when someone did not come, on every rank that did.
  std::string gather(std::uint64_t number, const std::string& mine, const Options& options,
                     const std::function<std::string(const std::vector<std::string>&)>& decide);

 private:
  std::string lead(std::uint64_t number, const std::string& mine, const Options& options,
                   const std::function<std::string(const std::vector<std::string>&)>& decide);
  std::string follow(std::uint64_t number, const std::string& mine, const Options& options);
  std::vector<int> missing(const std::vector<std::string>& keys);

  const std::unique_ptr<Store> store_;
  const int rank_;
  const std::vector<int> ranks_;
};

}  // namespace lockstep::internal
