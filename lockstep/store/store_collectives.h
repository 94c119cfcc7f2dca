// Collectives for the control plane, over nothing but a store: small values, set-up and tear-down, tools. Each call
// is keyed by a string that all its ranks pass and that is used for one call only.
//
// Blocking: every call that waits takes a timeout (5 minutes unless given; zero waits for ever) and raises
// DistStoreError of kind kTimeout naming the ranks that did not come.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "lockstep/store/store.h"

namespace lockstep {

// Returns when all `world_size` ranks have called it with this key. While it waits it logs at info, about every ten
// seconds, how many have come. Raises kUsage when more ranks than world_size came: the key was used before.
// Safe for several threads with distinct keys, each with its own handle.
void store_barrier(Store& store, int rank, int world_size, const std::string& key,
                   Milliseconds timeout = kDefaultStoreTimeout);

// Thread safety: any thread; calls that wait at the same time share the store's handle (see Store).
class StoreCollectives final {
 public:
  // Raises kUsage when `store` is null or `rank` is not in [0, world_size).
  StoreCollectives(std::shared_ptr<Store> store, int rank, int world_size);

  void barrier(const std::string& key, Milliseconds timeout = kDefaultStoreTimeout);

  // One rank sends, all others receive.
  void broadcast_send(const std::string& key, std::span<const std::uint8_t> value);
  Bytes broadcast_recv(const std::string& key, Milliseconds timeout = kDefaultStoreTimeout);

  // One rank receives the values of all, its own included, in the order of ranks; all others send.
  void gather_send(const std::string& key, std::span<const std::uint8_t> value);
  std::vector<Bytes> gather_recv(const std::string& key, std::span<const std::uint8_t> value,
                                 Milliseconds timeout = kDefaultStoreTimeout);

  // One rank sends values[i] to rank i and gets its own back; all others receive. Raises kUsage when there is not
  // one value per rank.
  Bytes scatter_send(const std::string& key, std::span<const Bytes> values);
  Bytes scatter_recv(const std::string& key, Milliseconds timeout = kDefaultStoreTimeout);

  // Everyone gets the values of all, in the order of ranks.
  std::vector<Bytes> all_gather(const std::string& key, std::span<const std::uint8_t> value,
                                Milliseconds timeout = kDefaultStoreTimeout);
  // Everyone gets the sum.
  std::int64_t all_sum(const std::string& key, std::int64_t value,
                       Milliseconds timeout = kDefaultStoreTimeout);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

 private:
  // Raises kUsage on a key's second use: the old values would be taken for new ones.
  void use(const char* operation, const std::string& key);
  std::vector<Bytes> collect(const char* operation, const std::string& key, Milliseconds timeout);

  // Constant after construction.
  const std::shared_ptr<Store> store_;
  const int rank_;
  const int world_size_;

  std::mutex mutex_;
  std::set<std::string> used_;  // guarded by mutex_
};

}  // namespace lockstep
