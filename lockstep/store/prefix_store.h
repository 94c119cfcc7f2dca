// A namespace inside another store: every key becomes "prefix/key" there. Nestable.
//
// Thread safety: that of the underlying store. Ownership: shares the underlying store; several prefixes may
// use one. The timeout is the underlying store's: set_timeout here changes it there.
#pragma once

#include <memory>

#include "lockstep/store/store.h"

namespace lockstep {

class PrefixStore final : public Store {
 public:
  // Raises kUsage when `store` is null.
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);

  using Store::set;
  void set(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  Bytes compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                    std::span<const std::uint8_t> desired) override;
  bool check(std::span<const std::string> keys) override;
  void wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout = {}) override;
  bool delete_key(const std::string& key) override;
  // The underlying store's count, including keys outside the prefix, as in torch.
  std::int64_t num_keys() override;
  // Only keys under the prefix, without it.
  std::vector<std::string> list_keys() override;
  void append(const std::string& key, std::span<const std::uint8_t> value) override;
  std::vector<Bytes> multi_get(std::span<const std::string> keys) override;
  void multi_set(std::span<const std::string> keys, std::span<const Bytes> values) override;
  void queue_push(const std::string& key, std::span<const std::uint8_t> value) override;
  Bytes queue_pop(const std::string& key) override;
  std::optional<Bytes> try_queue_pop(const std::string& key) override;
  std::int64_t queue_len(const std::string& key) override;
  // The same prefix over a clone of the underlying store.
  std::unique_ptr<Store> clone() override;
  bool has_extended_api() const override { return store_->has_extended_api(); }
  void set_timeout(Milliseconds timeout) override { store_->set_timeout(timeout); }
  Milliseconds timeout() const override { return store_->timeout(); }
  std::string describe() const override;

  const std::string& prefix() const { return prefix_; }
  // The store given to the constructor.
  const std::shared_ptr<Store>& underlying_store() const { return store_; }
  // The first store below that is not a PrefixStore.
  std::shared_ptr<Store> innermost_store() const;

 private:
  std::string inner(const std::string& key) const { return prefix_ + '/' + key; }
  std::vector<std::string> inner(std::span<const std::string> keys) const;

  // Constant after construction.
  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace lockstep
