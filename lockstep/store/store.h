// A key-value store through which ranks meet and exchange data. Keys are strings, values arbitrary bytes; an
// empty value is distinct from an absent one. Four implementations share this contract and its test suite:
// HashStore (threads of one process), FileStore (processes that share a file system), TcpStore (any
// processes; speaks the wire protocol of torch's TCPStore) and PrefixStore (a namespace inside another
// store).
//
// Thread safety: every method may be called from any thread; a blocking call on a TcpStore holds that
// handle's connection, so clone() the handle for a second thread that must not wait behind it.
// Blocking: get, multi_get, wait and queue_pop wait up to the handle's timeout (300 s unless changed;
// kNoTimeout waits forever). All other calls return promptly, or raise when the store does not answer within
// the timeout. A timeout of zero or less raises kUsage wherever one is given: options, set_timeout, wait.
// Errors: DistStoreError for a timeout or a bad value, DistNetworkError for a broken connection.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"

namespace lockstep {

inline constexpr Milliseconds kDefaultStoreTimeout{300'000};

class Store {
 public:
  virtual ~Store() = default;

  // Inserts or overwrites; wakes every waiter of the key. May return before others see it (tcp_store.h).
  virtual void set(const std::string& key, std::span<const std::uint8_t> value) = 0;
  void set(const std::string& key, std::string_view text) {
    set(key, {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  }
  // Waits for the key, then returns its value.
  virtual Bytes get(const std::string& key) = 0;
  // Adds to a counter stored as decimal text, an absent one counting as 0; returns the new value. A value
  // that is not a decimal integer raises kUsage and is left unchanged.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  // Stores `desired` if the current value equals `expected`, or if the key is absent and `expected` is empty.
  // Returns the value the key has afterwards; `expected` when the key is absent and remains absent.
  virtual Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                            std::span<const std::uint8_t> desired) = 0;
  // True when every key exists now. A queue exists while it is not empty.
  virtual bool check(std::span<const std::string> keys) = 0;
  // Waits until every key exists; `timeout` replaces the handle's for this call.
  virtual void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout = {}) = 0;
  // True when a key was removed.
  virtual bool delete_key(const std::string& key) = 0;
  // Number of keys (queues are not counted), including one bookkeeping key of TcpStore and FileStore, as in
  // torch.
  virtual std::int64_t num_keys() = 0;
  // User keys, in no particular order.
  virtual std::vector<std::string> list_keys() = 0;
  // Appends atomically, creating the key when absent.
  virtual void append(const std::string& key, std::span<const std::uint8_t> value) = 0;
  // Values in the order of `keys`; waits for those that are missing.
  virtual std::vector<Bytes> multi_get(std::span<const std::string> keys) = 0;
  // Sets all pairs; raises kUsage when the lengths differ.
  virtual void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) = 0;

  // Queues: first in, first out, under a key that must not also be used with set and get.
  virtual void queue_push(const std::string& key, std::span<const std::uint8_t> value) = 0;
  // Takes the oldest entry, waiting for one. One push wakes one waiter.
  virtual Bytes queue_pop(const std::string& key) = 0;
  // Never waits: nullopt when the queue is empty.
  virtual std::optional<Bytes> try_queue_pop(const std::string& key) = 0;
  // 0 when the queue does not exist.
  virtual std::int64_t queue_len(const std::string& key) = 0;

  // Another handle on the same data with its own timeout, for another thread.
  virtual std::unique_ptr<Store> clone() = 0;
  // True when append, multi_get and multi_set are single operations of the store.
  virtual bool has_extended_api() const = 0;
  // Default for the blocking calls of this handle. Raises kUsage unless it is positive; kNoTimeout waits
  // forever.
  virtual void set_timeout(Milliseconds timeout) = 0;
  virtual Milliseconds timeout() const = 0;
  // One line for logs: kind and address.
  virtual std::string describe() const = 0;
};

// Sets a store's timeout for a scope and restores the old one.
class StoreTimeoutGuard {
 public:
  StoreTimeoutGuard(Store& store, Milliseconds timeout) : store_(store), before_(store.timeout()) {
    store.set_timeout(timeout);
  }
  ~StoreTimeoutGuard() { store_.set_timeout(before_); }
  StoreTimeoutGuard(const StoreTimeoutGuard&) = delete;
  StoreTimeoutGuard& operator=(const StoreTimeoutGuard&) = delete;

 private:
  Store& store_;
  const Milliseconds before_;
};

}  // namespace lockstep
