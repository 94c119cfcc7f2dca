// A set that remembers the last `limit` ids put into it. For ids whose object has ended: a late or repeated
// message about one of them is recognised, and memory stays bounded.
// Thread safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

namespace lockstep::rpc::internal {

class RecentIds {
 public:
  explicit RecentIds(std::size_t limit) : limit_(limit) {}

  void add(std::uint64_t id) {
    if (!ids_.insert(id).second) return;
    order_.push_back(id);
    if (order_.size() <= limit_) return;
    ids_.erase(order_.front());
    order_.pop_front();
  }
  // Its place in the order stays taken until it is evicted: an id that is removed and added again may be
  // evicted early.
  void remove(std::uint64_t id) { ids_.erase(id); }
  bool contains(std::uint64_t id) const { return ids_.contains(id); }

 private:
  const std::size_t limit_;
  std::unordered_set<std::uint64_t> ids_;
  std::deque<std::uint64_t> order_;  // as added, oldest first; at most limit_
};

}  // namespace lockstep::rpc::internal
