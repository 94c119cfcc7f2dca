// Ranks that are threads of one process: state that is otherwise per process is per rank then.
//
// run_threads gives each of its threads a RankThread; threads that work on behalf of a rank (those of an RPC
// agent) adopt it. Each member belongs to one layer, which casts it to its own type.
// Thread safety: this_rank_thread() is thread-local.
#pragma once

#include <memory>

namespace lockstep::base {

struct RankThread {
  void* world = nullptr;          // group/: the default world
  std::shared_ptr<void> agent{};  // rpc/: its agent; set once, by the rank's own thread
};

// The calling thread's RankThread; null when the process is one rank. Not inline: with hidden symbols each
// shared library and the program would get its own copy of the variable.
RankThread*& this_rank_thread();

// The calling thread works on behalf of `rank` for the lifetime of this object.
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
