// What a TcpStore server holds: values, queues, and who waits for which key. No I/O.
//
// A waiter stands in the list of one key at a time, the first of its keys that is missing; when that key
// comes it moves on to the next missing one, or is done. So a write looks only at those who wait for the key
// it wrote.
//
// Thread safety: none; used by the server's loop thread alone.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/base/bytes.h"

namespace lockstep::internal {

// Memory the server may use for values, and for input and output on their way.
struct Quota {
  std::uint64_t limit = 0;
  std::uint64_t used = 0;
  std::uint64_t left() const { return used < limit ? limit - used : 0; }
};

// Somebody who waits for keys. Lives until done or canceled; must not move.
class TcpWaiter {
 public:
  enum class Wakes : std::uint8_t {
    kAll,    // looks at the keys
    kOneBy,  // will take an entry: one push wakes one of these
  };
  virtual ~TcpWaiter() = default;
  // All keys exist now; the waiter is in no list any more. Must not touch the data but to read or pop.
  virtual void ready() = 0;

 protected:
  std::vector<std::string>& keys() { return keys_; }
  bool waiting() const { return waiting_; }

 private:
  friend class TcpData;
  std::vector<std::string> keys_;
  std::size_t at_ = 0;  // keys before it were seen
  Wakes wakes_ = Wakes::kAll;
  bool waiting_ = false;
  std::list<TcpWaiter*>::iterator place_;
};

class TcpData {
 public:
  // `quota` must outlive this.
  explicit TcpData(Quota& quota) : quota_(quota) {}

  // Writes return false, changing nothing, when the quota would be passed.
  bool set(std::string_view key, std::span<const std::uint8_t> value);
  bool append(std::string_view key, std::span<const std::uint8_t> value);
  bool push(std::string_view key, std::span<const std::uint8_t> value);
  // Nothing when absent. Views hold until the next write.
  std::optional<std::span<const std::uint8_t>> find(std::string_view key) const;
  // The entry that pop() would take. Nothing when the queue is empty.
  std::optional<std::span<const std::uint8_t>> front(std::string_view key) const;
  std::optional<Bytes> pop(std::string_view key);
  std::int64_t queue_length(std::string_view key) const;
  bool exists(std::string_view key) const { return values_.contains(key) || queues_.contains(key); }
  bool erase(std::string_view key);
  std::size_t n_keys() const { return values_.size(); }
  template <class Function>
  void each_key(Function function) const {
    for (const auto& [key, value] : values_) function(std::string_view(key));
  }

  // What all of it costs, counted anew; equals the quota's account when no session holds any of that. For
  // tests.
  std::uint64_t count_bytes() const;

  // Calls ready() at once when all keys exist, else later, once.
  void wait(TcpWaiter& waiter, std::vector<std::string> keys, TcpWaiter::Wakes wakes);
  // True when it was waiting.
  bool cancel(TcpWaiter& waiter);
  // Somebody who was woken for a queue's entry is gone: wakes the next.
  void pass_on(std::string_view key);

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  template <class T>
  using Map = std::unordered_map<std::string, T, Hash, std::equal_to<>>;
  using Waiters = std::list<TcpWaiter*>;

  bool take(std::uint64_t n_bytes);
  void give(std::uint64_t n_bytes) { quota_.used -= n_bytes; }
  Bytes* find_or_make(std::string_view key, std::size_t extra);
  bool advance(TcpWaiter& waiter);
  void enlist(TcpWaiter& waiter);
  void written(std::string_view key);
  void pushed(std::string_view key);
  template <class Choose>
  void wake(std::string_view key, Choose choose);

  Quota& quota_;
  Map<Bytes> values_;
  Map<std::deque<Bytes>> queues_;  // never holds an empty queue
  Map<Waiters> waiters_;           // never holds an empty list
};

}  // namespace lockstep::internal
