// A gather over a store: each rank of a group contributes a few bytes; rank 0 collects them, decides, and
// publishes the result. Used to find ranks that are missing (monitored_barrier) or run something else (the
// debug wrapper). For group/.
//
// Gathers are numbered; all ranks participate in all of them in order. A rank that arrives late at a failed
// gather gets the reason of the failure. The keys of a gather are removed once all ranks have arrived at the
// next one.
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
  // `ranks`: of the world, for messages. Uses its own handle to the store, which it may block.
  StoreGather(Store& store, int rank, std::vector<int> ranks);

  struct Options {
    Milliseconds timeout;   // of rank 0
    Milliseconds patience;  // of the other ranks
    bool name_all;          // name every missing rank, not only the first
    std::string who;        // prefix of every message
    // Called periodically while waiting: raises when waiting has become pointless. May be empty.
    std::function<void()> still_worth_it{};
    bool one_look = false;  // rank 0 checks once without waiting; otherwise a timeout of zero means forever
  };
  // Contributes `mine`. Returns the result of rank 0's `decide` over all contributions, in rank order: ""
  // means success, anything else is up to the caller. Raises kTimeout when a rank did not arrive, on every
  // rank that did.
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
