#include "lockstep/store/hash_store.h"

#include <algorithm>
#include <deque>
#include <unordered_map>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/store/internal/checks.h"

namespace lockstep {

struct HashStore::Data {
  // Who waits for one key. Exists while somebody does: a condition variable must outlive its sleepers.
  struct Waiters {
    base::ConditionVariable exists;  // get and wait: all wake
    base::ConditionVariable pushed;  // queue_pop: one wakes per push
    int count = 0;
  };

  base::Mutex mutex;
  std::unordered_map<std::string, Bytes> values LOCKSTEP_GUARDED_BY(mutex);
  // Never holds an empty queue.
  std::unordered_map<std::string, std::deque<Bytes>> queues LOCKSTEP_GUARDED_BY(mutex);
  std::unordered_map<std::string, Waiters> waiters LOCKSTEP_GUARDED_BY(mutex);

  bool exists(const std::string& key) const LOCKSTEP_REQUIRES(mutex) {
    return values.contains(key) || queues.contains(key);
  }

  void wake(const std::string& key) LOCKSTEP_REQUIRES(mutex) {
    if (const auto found = waiters.find(key); found != waiters.end()) found->second.exists.notify_all();
  }
  void store(const std::string& key, Bytes value) LOCKSTEP_REQUIRES(mutex) {
    values.insert_or_assign(key, std::move(value));
    wake(key);
  }
  Bytes take(const std::string& key) LOCKSTEP_REQUIRES(mutex) {
    const auto found = queues.find(key);
    Bytes value = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) queues.erase(found);
    return value;
  }
  // Sleeps on one of the key's condition variables until `ready` or the deadline; returns what `ready` says
  // then.
  // Condition variables per key: a write wakes only those who wait for that key.
  template <class Ready>
  bool sleep(const std::string& key, base::ConditionVariable Waiters::*on, Deadline deadline, Ready ready)
      LOCKSTEP_REQUIRES(mutex) {
    Waiters& mine = waiters[key];  // references stay valid while other keys are added and removed
    ++mine.count;
    base::SlowWait slow(deadline);
    bool is_ready = (mine.*on).wait_until(mutex, slow.next().time_point(), ready);
    if (!is_ready && !deadline.expired()) {
      slow.say_if_due([&] { return internal::waiting_text("HashStore", {&key, 1}); });
      is_ready = (mine.*on).wait_until(mutex, deadline.time_point(), ready);
    }
    if (--mine.count == 0) waiters.erase(key);
    return is_ready;
  }
  // Waits until all keys exist together: one that was there may be deleted while the next is awaited.
  void wait_all(std::span<const std::string> keys, Milliseconds timeout) LOCKSTEP_REQUIRES(mutex) {
    const Deadline deadline = Deadline::after(timeout);
    const auto missing = [&](const std::string& key) LOCKSTEP_REQUIRES(mutex) { return !exists(key); };
    for (auto it = keys.begin(); (it = std::find_if(keys.begin(), keys.end(), missing)) != keys.end();) {
      const auto there = [&]() LOCKSTEP_REQUIRES(mutex) { return exists(*it); };
      if (sleep(*it, &Waiters::exists, deadline, there)) continue;
      std::vector<std::string> absent;
      std::copy_if(keys.begin(), keys.end(), std::back_inserter(absent), missing);
      internal::raise_wait_timeout("HashStore", timeout, absent);
    }
  }
};

HashStore::HashStore(HashStoreOptions options)
    : HashStore(std::make_shared<Data>(),
                base::checked_timeout(options.timeout, "HashStore", ErrorFamily::kStore)) {}
HashStore::HashStore(std::shared_ptr<Data> data, Milliseconds timeout)
    : data_(std::move(data)), timeout_(timeout) {}
HashStore::~HashStore() = default;

// Every method is one critical section of the data's mutex, so each is atomic to all handles (clone() shares
// the data). Waits release it; what they looked at before may have changed when they return, which is why
// wait_all() starts over and multi_get() reads in the same section as the last look.

void HashStore::set(const std::string& key, std::span<const std::uint8_t> value) {
  Bytes bytes = to_bytes(value);  // large values are copied outside the lock
  const base::MutexLock lock(data_->mutex);
  data_->store(key, std::move(bytes));
}

Bytes HashStore::get(const std::string& key) {
  return std::move(multi_get({&key, 1}).front());
}

std::int64_t HashStore::add(const std::string& key, std::int64_t amount) {
  const base::MutexLock lock(data_->mutex);
  const auto found = data_->values.find(key);
  const std::int64_t after =
      found == data_->values.end() ? amount : internal::add_to_counter(key, found->second, amount);
  data_->store(key, to_bytes(std::to_string(after)));
  return after;
}

Bytes HashStore::compare_set(const std::string& key, std::span<const std::uint8_t> expected,
                             std::span<const std::uint8_t> desired) {
  const base::MutexLock lock(data_->mutex);
  const auto found = data_->values.find(key);
  const bool absent = found == data_->values.end();
  // As torch has it: an absent key is only set by an empty `expected`, and otherwise `expected` comes back,
  // although the key does not have that value.
  if (absent && !expected.empty()) return to_bytes(expected);
  if (!absent && !std::ranges::equal(found->second, expected)) return found->second;
  data_->store(key, to_bytes(desired));
  return to_bytes(desired);
}

bool HashStore::check(std::span<const std::string> keys) {
  const base::MutexLock lock(data_->mutex);
  return std::all_of(keys.begin(), keys.end(),
                     [&](const auto& key) LOCKSTEP_REQUIRES(data_->mutex) { return data_->exists(key); });
}

void HashStore::wait(std::span<const std::string> keys, std::optional<Milliseconds> timeout) {
  if (timeout) base::checked_timeout(*timeout, "HashStore: wait", ErrorFamily::kStore);
  const base::MutexLock lock(data_->mutex);
  data_->wait_all(keys, timeout.value_or(timeout_.load()));
}

bool HashStore::delete_key(const std::string& key) {
  const base::MutexLock lock(data_->mutex);
  return data_->values.erase(key) > 0;
}

std::int64_t HashStore::num_keys() {
  const base::MutexLock lock(data_->mutex);
  return static_cast<std::int64_t>(data_->values.size());
}

std::vector<std::string> HashStore::list_keys() {
  const base::MutexLock lock(data_->mutex);
  std::vector<std::string> keys;
  keys.reserve(data_->values.size());
  for (const auto& [key, value] : data_->values) keys.push_back(key);
  return keys;
}

void HashStore::append(const std::string& key, std::span<const std::uint8_t> value) {
  const base::MutexLock lock(data_->mutex);
  Bytes& bytes = data_->values[key];
  bytes.insert(bytes.end(), value.begin(), value.end());
  data_->wake(key);
}

std::vector<Bytes> HashStore::multi_get(std::span<const std::string> keys) {
  const base::MutexLock lock(data_->mutex);
  data_->wait_all(keys, timeout_);
  std::vector<Bytes> values;
  values.reserve(keys.size());
  for (const auto& key : keys) {
    const auto found = data_->values.find(key);
    if (found == data_->values.end()) internal::raise_is_queue("HashStore", key);
    values.push_back(found->second);
  }
  return values;
}

void HashStore::multi_set(std::span<const std::string> keys, std::span<const Bytes> values) {
  internal::check_pairs(keys.size(), values.size());
  const base::MutexLock lock(data_->mutex);
  for (std::size_t i = 0; i < keys.size(); ++i) data_->store(keys[i], values[i]);
}

void HashStore::queue_push(const std::string& key, std::span<const std::uint8_t> value) {
  const base::MutexLock lock(data_->mutex);
  data_->queues[key].push_back(to_bytes(value));
  // Two kinds of sleepers: those of wait() and get() all see that the key exists now; of those of queue_pop()
  // one can have the entry.
  data_->wake(key);
  if (const auto found = data_->waiters.find(key); found != data_->waiters.end()) {
    found->second.pushed.notify_one();
  }
}

Bytes HashStore::queue_pop(const std::string& key) {
  const base::MutexLock lock(data_->mutex);
  const Milliseconds timeout = timeout_;
  const auto ready = [&]() LOCKSTEP_REQUIRES(data_->mutex) { return data_->queues.contains(key); };
  // Between a push's notification and this thread's waking another may pop: then sleep() goes on.
  if (!ready() && !data_->sleep(key, &Data::Waiters::pushed, Deadline::after(timeout), ready)) {
    internal::raise_wait_timeout("HashStore", timeout, {&key, 1});
  }
  return data_->take(key);
}

std::optional<Bytes> HashStore::try_queue_pop(const std::string& key) {
  const base::MutexLock lock(data_->mutex);
  if (!data_->queues.contains(key)) return std::nullopt;
  return data_->take(key);
}

std::int64_t HashStore::queue_len(const std::string& key) {
  const base::MutexLock lock(data_->mutex);
  const auto found = data_->queues.find(key);
  return found == data_->queues.end() ? 0 : static_cast<std::int64_t>(found->second.size());
}

void HashStore::set_timeout(Milliseconds timeout) {
  timeout_ = base::checked_timeout(timeout, "HashStore: set_timeout", ErrorFamily::kStore);
}

std::unique_ptr<Store> HashStore::clone() {
  return std::unique_ptr<Store>(new HashStore(data_, timeout_));
}

}  // namespace lockstep
