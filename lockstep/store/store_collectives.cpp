#include "lockstep/store/store_collectives.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep {
namespace {

// Under a user's key: "/rank/<r>" is rank r's value or its arrival, "/count" and "/last" are a barrier's,
// "/sum" is all_sum's; a broadcast uses the key itself. None is ever deleted: a late rank must still find
// them, and no rank knows when all have read.
std::string rank_key(const std::string& key, int rank) {
  return base::cat(key, "/rank/", rank);
}

std::vector<std::string> rank_keys(const std::string& key, int world_size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) keys.push_back(rank_key(key, rank));
  return keys;
}

void check_rank(int rank, int world_size) {
  if (rank >= 0 && rank < world_size) return;
  base::raise(ErrorKind::kUsage, base::cat("rank ", rank, " is not in a world of ", world_size),
              ErrorFamily::kStore);
}

// "2 of 4 ranks arrived; missing: 1, 3". Asks the store, which is slow, and is for errors only.
std::string who_is_missing(Store& store, const std::string& key, int world_size) {
  constexpr int kShown = 16;
  int missing = 0;
  std::string names;
  for (const auto& one : rank_keys(key, world_size)) {
    if (store.check({&one, 1})) continue;
    if (++missing <= kShown) names += base::cat(missing == 1 ? "" : ", ", one.substr(one.rfind('/') + 1));
  }
  if (missing > kShown) names += ", ...";
  return base::cat(world_size - missing, " of ", world_size, " ranks arrived; missing: ", names);
}

[[noreturn]] void raise_late(const std::string& what, Milliseconds timeout, const std::string& who) {
  base::raise(ErrorKind::kTimeout, base::cat(what, " timed out after ", timeout.count(), " ms: ", who),
              ErrorFamily::kStore);
}

// False when the timeout passed; other errors go up.
bool wait_for(Store& store, std::span<const std::string> keys, Milliseconds timeout) {
  try {
    store.wait(keys, timeout);
    return true;
  } catch (const DistStoreError& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    return false;
  }
}

}  // namespace

void store_barrier(Store& store, int rank, int world_size, const std::string& key,
                   std::optional<Milliseconds> given) {
  check_rank(rank, world_size);
  const Milliseconds timeout = base::checked_timeout(
      given.value_or(store.timeout()), base::cat("store barrier \"", key, '"'), ErrorFamily::kStore);
  // The keys of a barrier that timed out stay: a second attempt under the same key would count the same ranks
  // again.
  const Deadline deadline = Deadline::after(timeout);
  const std::string count_key = key + "/count";
  const std::string last_key = key + "/last";
  const std::string what = base::cat("store barrier \"", key, "\" on rank ", rank);
  store.set(rank_key(key, rank), "");
  // After the rank's own key was set: whoever sees the full count finds all ranks. One key that the last rank
  // sets lets all others wait for one key instead of polling a counter.
  const std::int64_t count = store.add(count_key, 1);
  if (count > world_size) {
    base::raise(ErrorKind::kUsage,
                base::cat(what, ": ", count, " ranks arrived at a barrier of ", world_size,
                          ": the key was used before"),
                ErrorFamily::kStore);
  }
  // Exactly one rank gets here, since add() is atomic.
  if (count == world_size) return store.set(last_key, "");
  // Large worlds take longer to arrive, and need not log it as often.
  const Milliseconds slice{10'000 + world_size};
  base::SlowWait slow(deadline);
  for (;;) {
    // The wait inside the store would log its own slow wait, about a key that says nothing to a user; it ends
    // before that is due, and this level names the missing ranks.
    if (wait_for(store, {&last_key, 1}, std::min(slow.quiet_slice(), slice))) return;
    if (deadline.expired()) raise_late(what, timeout, who_is_missing(store, key, world_size));
    slow.say_if_due([&] { return base::cat(what, ": ", who_is_missing(store, key, world_size)); });
    base::log(LogLevel::kInfo,
              base::cat(what, ": waiting, ", store.add(count_key, 0), " of ", world_size, " ranks came"));
  }
}

StoreCollectives::StoreCollectives(std::shared_ptr<Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  if (!store_) base::raise(ErrorKind::kUsage, "StoreCollectives: the store is null", ErrorFamily::kStore);
  check_rank(rank, world_size);
}

Milliseconds StoreCollectives::use(const char* operation, const std::string& key,
                                   std::optional<Milliseconds> given) {
  const Milliseconds timeout = given.value_or(store_->timeout());
  if (given) base::checked_timeout(timeout, base::cat(operation, " \"", key, '"'), ErrorFamily::kStore);
  // Marked as used before anything is sent, and for good, also when the operation then fails: its keys may be
  // in the store already. Only this object knows: a key used again through another one is noticed by barriers
  // alone, which count.
  const base::MutexLock lock(mutex_);
  if (used_.insert(key).second) return timeout;
  base::raise(ErrorKind::kUsage,
              base::cat(operation, ": key \"", key, "\" was used before; every call needs its own"),
              ErrorFamily::kStore);
}

std::vector<Bytes> StoreCollectives::collect(const char* operation, const std::string& key,
                                             Milliseconds timeout) {
  const auto keys = rank_keys(key, world_size_);
  if (!wait_for(*store_, keys, timeout)) {
    raise_late(base::cat(operation, " \"", key, "\" on rank ", rank_), timeout,
               who_is_missing(*store_, key, world_size_));
  }
  // Nobody deletes the keys, so after the wait this returns at once.
  return store_->multi_get(keys);
}

void StoreCollectives::barrier(const std::string& key, std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("barrier", key, given);
  store_barrier(*store_, rank_, world_size_, key, timeout);
}

void StoreCollectives::broadcast_send(const std::string& key, std::span<const std::uint8_t> value) {
  use("broadcast", key);
  // The sender does not wait for the receivers; the store must outlive their reads.
  store_->set(key, value);
}

Bytes StoreCollectives::broadcast_recv(const std::string& key, std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("broadcast", key, given);
  if (!wait_for(*store_, {&key, 1}, timeout)) {
    raise_late(base::cat("broadcast \"", key, "\" on rank ", rank_), timeout,
               "the sending rank did not arrive");
  }
  return store_->get(key);
}

void StoreCollectives::gather_send(const std::string& key, std::span<const std::uint8_t> value) {
  use("gather", key);
  store_->set(rank_key(key, rank_), value);
}

std::vector<Bytes> StoreCollectives::gather_recv(const std::string& key, std::span<const std::uint8_t> value,
                                                 std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("gather", key, given);
  store_->set(rank_key(key, rank_), value);
  return collect("gather", key, timeout);
}

Bytes StoreCollectives::scatter_send(const std::string& key, std::span<const Bytes> values) {
  use("scatter", key);
  if (values.size() != static_cast<std::size_t>(world_size_)) {
    base::raise(ErrorKind::kUsage,
                base::cat("scatter \"", key, "\": ", values.size(), " values for ", world_size_, " ranks"),
                ErrorFamily::kStore);
  }
  // All parts in one request where the store has one; each receiver waits for its own key only.
  store_->multi_set(rank_keys(key, world_size_), values);
  return values[static_cast<std::size_t>(rank_)];
}

Bytes StoreCollectives::scatter_recv(const std::string& key, std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("scatter", key, given);
  const std::string mine = rank_key(key, rank_);
  if (!wait_for(*store_, {&mine, 1}, timeout)) {
    raise_late(base::cat("scatter \"", key, "\" on rank ", rank_), timeout,
               "the sending rank did not arrive");
  }
  return store_->get(mine);
}

std::vector<Bytes> StoreCollectives::all_gather(const std::string& key, std::span<const std::uint8_t> value,
                                                std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("all_gather", key, given);
  store_->set(rank_key(key, rank_), value);
  return collect("all_gather", key, timeout);
}

std::int64_t StoreCollectives::all_sum(const std::string& key, std::int64_t value,
                                       std::optional<Milliseconds> given) {
  const Milliseconds timeout = use("all_sum", key, given);
  const std::string sum_key = key + "/sum";
  // Before the barrier: past it, all summands are in the counter, and adding 0 reads the same sum on every
  // rank.
  store_->add(sum_key, value);
  store_barrier(*store_, rank_, world_size_, key, timeout);
  return store_->add(sum_key, 0);
}

}  // namespace lockstep
