#include "lockstep/store/internal/tcp_data.h"

#include <algorithm>

namespace lockstep::internal {

namespace {

// What a map entry costs beside its bytes, roughly.
constexpr std::uint64_t kEntry = 96;

}  // namespace

bool TcpData::take(std::uint64_t n_bytes) {
  if (n_bytes > quota_.left()) return false;
  quota_.used += n_bytes;
  return true;
}

// Null when the quota has no room for the entry and `extra` bytes of value, which it takes.
Bytes* TcpData::find_or_make(std::string_view key, std::size_t extra) {
  const auto found = values_.find(key);
  const std::uint64_t cost = extra + (found == values_.end() ? kEntry + key.size() : 0);
  if (!take(cost)) return nullptr;
  if (found != values_.end()) return &found->second;
  return &values_.emplace(key, Bytes()).first->second;
}

// The new value is taken from the quota before the old one is returned: a full store may refuse to replace a
// value by a smaller one, but is never over its limit.
bool TcpData::set(std::string_view key, std::span<const std::uint8_t> value) {
  Bytes* place = find_or_make(key, value.size());
  if (place == nullptr) return false;
  give(place->size());
  // A small value does not keep the memory of a large one before it.
  if (place->capacity() / 2 > value.size() + 64) *place = Bytes();
  place->assign(value.begin(), value.end());
  written(key);
  return true;
}

bool TcpData::append(std::string_view key, std::span<const std::uint8_t> value) {
  Bytes* place = find_or_make(key, value.size());
  if (place == nullptr) return false;
  place->insert(place->end(), value.begin(), value.end());
  written(key);
  return true;
}

bool TcpData::push(std::string_view key, std::span<const std::uint8_t> value) {
  const auto found = queues_.find(key);
  const bool is_new = found == queues_.end();
  if (!take(value.size() + kEntry + (is_new ? key.size() : 0))) return false;
  auto& queue = is_new ? queues_.emplace(key, std::deque<Bytes>()).first->second : found->second;
  queue.emplace_back(value.begin(), value.end());
  pushed(key);
  return true;
}

std::optional<std::span<const std::uint8_t>> TcpData::find(std::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return std::span<const std::uint8_t>(found->second);
}

std::optional<std::span<const std::uint8_t>> TcpData::front(std::string_view key) const {
  const auto found = queues_.find(key);
  if (found == queues_.end()) return std::nullopt;
  return std::span<const std::uint8_t>(found->second.front());
}

std::optional<Bytes> TcpData::pop(std::string_view key) {
  const auto found = queues_.find(key);
  if (found == queues_.end()) return std::nullopt;
  Bytes value = std::move(found->second.front());
  found->second.pop_front();
  give(value.size() + kEntry);
  if (found->second.empty()) {
    give(found->first.size());
    queues_.erase(found);
  }
  return value;
}

std::int64_t TcpData::queue_length(std::string_view key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0 : static_cast<std::int64_t>(found->second.size());
}

bool TcpData::erase(std::string_view key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  give(kEntry + found->first.size() + found->second.size());
  values_.erase(found);
  return true;
}

std::uint64_t TcpData::count_bytes() const {
  std::uint64_t n_bytes = 0;
  for (const auto& [key, value] : values_) n_bytes += kEntry + key.size() + value.size();
  for (const auto& [key, queue] : queues_) {
    n_bytes += key.size();
    for (const Bytes& value : queue) n_bytes += kEntry + value.size();
  }
  return n_bytes;
}

// True when all keys exist; else at_ is the first that does not. Keys seen before may be gone again: the last
// step is a look at all of them.
bool TcpData::advance(TcpWaiter& waiter) {
  const auto missing = [this](const std::string& key) { return !exists(key); };
  auto& keys = waiter.keys_;
  auto at = std::find_if(keys.begin() + static_cast<std::ptrdiff_t>(waiter.at_), keys.end(), missing);
  if (at == keys.end() && waiter.at_ > 0) at = std::find_if(keys.begin(), keys.end(), missing);
  waiter.at_ = static_cast<std::size_t>(at - keys.begin());
  return at == keys.end();
}

// A waiter is in one list only, that of the first key it misses: a write costs the waiters of that key, not
// those of all.
void TcpData::enlist(TcpWaiter& waiter) {
  const std::string& key = waiter.keys_[waiter.at_];
  auto found = waiters_.find(key);
  if (found == waiters_.end()) found = waiters_.emplace(key, Waiters()).first;
  waiter.place_ = found->second.insert(found->second.end(), &waiter);
  waiter.waiting_ = true;
}

void TcpData::wait(TcpWaiter& waiter, std::vector<std::string> keys, TcpWaiter::Wakes wakes) {
  waiter.keys_ = std::move(keys);
  waiter.wakes_ = wakes;
  waiter.at_ = 0;
  if (advance(waiter)) {
    waiter.ready();
  } else {
    enlist(waiter);
  }
}

bool TcpData::cancel(TcpWaiter& waiter) {
  if (!waiter.waiting_) return false;
  const auto found = waiters_.find(waiter.keys_[waiter.at_]);
  found->second.erase(waiter.place_);
  if (found->second.empty()) waiters_.erase(found);
  waiter.waiting_ = false;
  return true;
}

// Goes once through those who wait for the key and whom `choose` takes, in the order they came, and serves
// each whose other keys exist too; ends after the first that will take the entry of a queue.
template <class Choose>
void TcpData::wake(std::string_view key, Choose choose) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  // Whoever moves on to another key must not be met again here, nor newcomers: work on the list as it is now.
  Waiters& list = found->second;
  std::vector<TcpWaiter*> chosen;
  for (TcpWaiter* waiter : list) {
    if (choose(waiter->wakes_)) chosen.push_back(waiter);
  }
  for (TcpWaiter* waiter : chosen) {
    if (!cancel(*waiter)) continue;
    if (!advance(*waiter)) {
      enlist(*waiter);
      continue;
    }
    // Before ready(), which may end the waiter's session.
    const bool last = waiter->wakes_ == TcpWaiter::Wakes::kOneBy && queues_.contains(key);
    waiter->ready();
    if (last) return;
  }
}

void TcpData::written(std::string_view key) {
  if (waiters_.empty()) return;
  wake(key, [](TcpWaiter::Wakes) { return true; });
}

// First those who only want to know that the key exists, all of them; then one that will take the entry.
void TcpData::pushed(std::string_view key) {
  if (waiters_.empty()) return;
  wake(key, [](TcpWaiter::Wakes wakes) { return wakes == TcpWaiter::Wakes::kAll; });
  pass_on(key);
}

void TcpData::pass_on(std::string_view key) {
  if (!queues_.contains(key)) return;
  wake(key, [](TcpWaiter::Wakes wakes) { return wakes == TcpWaiter::Wakes::kOneBy; });
}

}  // namespace lockstep::internal
