#include "lockstep/store/prefix_store.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/checks.h"

namespace lockstep {

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix)), store_(std::move(store)) {
  if (!store_) base::raise(ErrorKind::kUsage, base::cat("PrefixStore(\"", prefix_, "\"): the store is null"));
}

std::vector<std::string> PrefixStore::inner(std::span<const std::string> keys) const {
  std::vector<std::string> result;
  result.reserve(keys.size());
  for (const auto& key : keys) result.push_back(inner(key));
  return result;
}

void PrefixStore::set(const std::string& key, std::span<const std::uint8_t> value) {
  store_->set(inner(key), value);
}

Bytes PrefixStore::get(const std::string& key) {
  return store_->get(inner(key));
}

std::int64_t PrefixStore::add(const std::string& key, std::int64_t amount) {
  return store_->add(inner(key), amount);
}

Bytes PrefixStore::compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                               std::span<const std::uint8_t> desired) {
  return store_->compare_set(inner(key), expected, desired);
}

bool PrefixStore::check(std::span<const std::string> keys) {
  return store_->check(inner(keys));
}

void PrefixStore::wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout) {
  store_->wait(inner(keys), timeout);
}

bool PrefixStore::delete_key(const std::string& key) {
  return store_->delete_key(inner(key));
}

std::int64_t PrefixStore::num_keys() {
  return store_->num_keys();
}

std::vector<std::string> PrefixStore::list_keys() {
  const std::string head = inner("");
  std::vector<std::string> result;
  for (const auto& key : store_->list_keys()) {
    if (key.starts_with(head)) result.push_back(key.substr(head.size()));
  }
  return result;
}

void PrefixStore::append(const std::string& key, std::span<const std::uint8_t> value) {
  store_->append(inner(key), value);
}

std::vector<Bytes> PrefixStore::multi_get(std::span<const std::string> keys) {
  return store_->multi_get(inner(keys));
}

void PrefixStore::multi_set(std::span<const std::string> keys, std::span<const Bytes> values) {
  internal::check_pairs(keys.size(), values.size());
  store_->multi_set(inner(keys), values);
}

void PrefixStore::queue_push(const std::string& key, std::span<const std::uint8_t> value) {
  store_->queue_push(inner(key), value);
}

Bytes PrefixStore::queue_pop(const std::string& key) {
  return store_->queue_pop(inner(key));
}

std::optional<Bytes> PrefixStore::try_queue_pop(const std::string& key) {
  return store_->try_queue_pop(inner(key));
}

std::int64_t PrefixStore::queue_len(const std::string& key) {
  return store_->queue_len(inner(key));
}

std::unique_ptr<Store> PrefixStore::clone() {
  return std::make_unique<PrefixStore>(prefix_, store_->clone());
}

std::string PrefixStore::describe() const {
  return base::cat("PrefixStore(", prefix_, ", ", store_->describe(), ")");
}

std::shared_ptr<Store> PrefixStore::innermost_store() const {
  std::shared_ptr<Store> store = store_;
  while (const auto* prefix = dynamic_cast<const PrefixStore*>(store.get())) store = prefix->store_;
  return store;
}

}  // namespace lockstep
