// The ranks of one host that found each other, and how a communicator's ranks join: shared by a communicator that was made
// without a parent and all that were made on it. Watches the processes of the others.
// Thread: "ls-peer-watch" of local/death_watch.h, one per family.
// Thread safety: every method may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engines/cuda_ipc/control_page.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/local/death_watch.h"

namespace lockstep::cuda_ipc {

// What the watch needs of a communicator. Ranks are those of the family.
class Relative {
 public:
  // Still needs that rank, which has not left in order.
  virtual bool needs(int family_rank) = 0;
  virtual void lost(int family_rank, const std::string& cause) = 0;
  virtual const lockstep_host& host() = 0;
  virtual int rank_of(int family_rank) = 0;

 protected:
  ~Relative() = default;
};

class Family {
 public:
  struct Member {
    std::int64_t pid = -1;
    bool same_process = false;
    local::PeerProcess process{};
  };

  explicit Family(std::vector<Member> members);

  const Member& member(int r) const { return members_[static_cast<std::size_t>(r)]; }
  // Its process has ended; never blocks.
  bool is_lost(int r) const { return gone_[static_cast<std::size_t>(r)].load(std::memory_order_acquire); }
  // From now on it is told of losses, at once of those that were before. remove() returns when the watch is not inside it.
  void add(Relative& relative);
  void remove(Relative& relative);

 private:
  void tell(int r, local::DeathWatch::Loss loss);
  std::string cause_of_loss(Relative& relative, int r);

  const std::vector<Member> members_;
  const std::unique_ptr<std::atomic<bool>[]> gone_;
  base::Mutex mutex_;  // held while relatives are told
  std::vector<Relative*> relatives_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<std::pair<int, std::string>> lost_ LOCKSTEP_GUARDED_BY(mutex_);
  std::unique_ptr<local::DeathWatch> watch_;  // the last member: it ends first
};

struct Joined {
  std::shared_ptr<Family> family;
  std::vector<int> ranks;  // in the family, by rank here
  std::shared_ptr<ControlPage> page;
};

// Collective. Blocks until all ranks have mapped the page, or config.deadline_ns. `parent`: the family of the parent and the
// ranks in it of the parent's ranks; or null. `prepare` is run before this rank counts as joined: when it raises, the others
// are told. Raises as local::meet.
struct Parent {
  std::shared_ptr<Family> family;
  std::vector<int> ranks;
};
Joined join(const lockstep_comm_config& config, const Parent* parent,
            const std::function<void(ControlPage&)>& prepare);

}  // namespace lockstep::cuda_ipc
