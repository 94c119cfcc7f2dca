// Collectives for the control plane that need only a store: for small values, set-up and tear-down, tools.
// Each call is identified by a key that all its ranks pass and that is used for one call only.
//
// Blocking: every call that waits takes a timeout (unset: the store's; kNoTimeout waits forever; zero and
// negative ones raise kUsage before anything is written) and raises DistStoreError of kind kTimeout naming
// the ranks that did not arrive.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/store/store.h"

namespace lockstep {

// Returns when all `world_size` ranks have called it with this key. While waiting it logs at info, about
// every ten seconds, how many have arrived. Raises kUsage when more ranks than world_size arrived: the key
// was used before. Safe for several threads with distinct keys, each with its own handle.
void store_barrier(Store& store, int rank, int world_size, const std::string& key,
                   std::optional<Milliseconds> timeout = {});

// Thread safety: every method may be called from any thread; calls that wait concurrently share the store's
// handle (see Store).
class StoreCollectives final {
 public:
  // Raises kUsage when `store` is null or `rank` is not in [0, world_size).
  StoreCollectives(std::shared_ptr<Store> store, int rank, int world_size);

  void barrier(const std::string& key, std::optional<Milliseconds> timeout = {});

  // One rank sends, all others receive.
  void broadcast_send(const std::string& key, std::span<const std::uint8_t> value);
  Bytes broadcast_recv(const std::string& key, std::optional<Milliseconds> timeout = {});

  // One rank receives the values of all, including its own, in rank order; all others send.
  void gather_send(const std::string& key, std::span<const std::uint8_t> value);
  std::vector<Bytes> gather_recv(const std::string& key, std::span<const std::uint8_t> value,
                                 std::optional<Milliseconds> timeout = {});

  // One rank sends values[i] to rank i and returns its own; all others receive. Raises kUsage unless there is
  // exactly one value per rank.
  Bytes scatter_send(const std::string& key, std::span<const Bytes> values);
  Bytes scatter_recv(const std::string& key, std::optional<Milliseconds> timeout = {});

  // Every rank gets the values of all, in rank order.
  std::vector<Bytes> all_gather(const std::string& key, std::span<const std::uint8_t> value,
                                std::optional<Milliseconds> timeout = {});
  // Every rank gets the sum.
  std::int64_t all_sum(const std::string& key, std::int64_t value, std::optional<Milliseconds> timeout = {});

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

 private:
  // The timeout that applies. Raises kUsage on the second use of a key, whose old values would be mistaken
  // for new ones, and for an invalid timeout.
  Milliseconds use(const char* operation, const std::string& key, std::optional<Milliseconds> timeout = {});
  std::vector<Bytes> collect(const char* operation, const std::string& key, Milliseconds timeout);

  // Constant after construction.
  const std::shared_ptr<Store> store_;
  const int rank_;
  const int world_size_;

  base::Mutex mutex_;
  std::set<std::string> used_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
