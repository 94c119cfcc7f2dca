// Ranks that are threads of one process: what would otherwise be one per process is then one per rank.
//
// run_threads gives each of its threads a RankThread; threads that work on behalf of a rank (an RPC agent's) adopt it.
// The members are the singletons' own business: each layer casts the one it keeps there.
#pragma once

#include <memory>

namespace lockstep::base {

struct RankThread {
  void* world = nullptr;          // group/: the default world
  std::shared_ptr<void> agent{};  // rpc/: where its agent is kept; set once, by the rank's own thread
};

// The calling thread's; null when this process is one rank. Not inline: shared libraries and a program with hidden symbols
// would have a variable each.
RankThread*& this_rank_thread();

// The calling thread works for `rank` while this lives.
class RankThreadScope {
 public:
  explicit RankThreadScope(RankThread* rank) : before_(this_rank_thread()) { this_rank_thread() = rank; }
  ~RankThreadScope() { this_rank_thread() = before_; }
  RankThreadScope(const RankThreadScope&) = delete;
  RankThreadScope& operator=(const RankThreadScope&) = delete;

 private:
  RankThread* const before_;
};

}  // namespace lockstep::base
