// A store in this process's memory, for ranks that are threads. One mutex guards the data; each key with
// waiters has its own condition variables, so a set wakes only the waiters of that key.
//
// Thread safety: as Store. Ownership: clones share the data, which lives as long as the last of them.
#pragma once

#include <atomic>
#include <memory>

#include "lockstep/store/store.h"

namespace lockstep {

struct HashStoreOptions {
  Milliseconds timeout = kDefaultStoreTimeout;
};

class HashStore final : public Store {
 public:
  explicit HashStore(HashStoreOptions options = {});
  ~HashStore() override;

  using Store::set;
  void set(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                    std::span<const std::uint8_t> desired) override;
  bool check(std::span<const std::string> keys) override;
  void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout = {}) override;
  bool delete_key(const std::string& key) override;
  std::int64_t num_keys() override;
  std::vector<std::string> list_keys() override;
  void append(const std::string& key, std::span<const std::uint8_t> value) override;
  std::vector<Bytes> multi_get(std::span<const std::string> keys) override;
  void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) override;
  void queue_push(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes queue_pop(const std::string& key) override;
  std::optional<Bytes> try_queue_pop(const std::string& key) override;
  std::int64_t queue_len(const std::string& key) override;
  std::unique_ptr<Store> clone() override;
  bool has_extended_api() const override { return true; }
  void set_timeout(Milliseconds timeout) override;
  Milliseconds timeout() const override { return timeout_; }
  std::string describe() const override { return "HashStore"; }

 private:
  struct Data;
  HashStore(std::shared_ptr<Data> data, Milliseconds timeout);

  // Shared by clones, and by calls in flight on them.
  const std::shared_ptr<Data> data_;
  std::atomic<Milliseconds> timeout_;
};

}  // namespace lockstep
