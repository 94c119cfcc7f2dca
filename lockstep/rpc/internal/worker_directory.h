// The workers an agent knows, by number and by name.
// Thread safety: every method may be called from any thread.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/worker.h"

namespace lockstep::rpc::internal {

class WorkerDirectory {
 public:
  // Takes its number and its name; what arrives from it is accepted from now on. It cannot be found before
  // list(). Raises kUsage when the number or the name is taken.
  // Returns its incarnation.
  std::uint64_t add(const WorkerInfo& info);
  // From now on it can be found: messages to it have a way. 0: whoever has the number.
  void list(WorkerId id, std::uint64_t incarnation = 0);
  // From now on it is known as gone, for messages; its name may come back under another number. False when it
  // was gone already. `incarnation`: only if it is still the same (0: whoever it is).
  bool end(WorkerId id, const std::string& cause, std::uint64_t incarnation = 0);
  // Tells workers apart that have one number after the other; 0 when none has it.
  std::uint64_t incarnation(WorkerId id) const;
  // Raises kUsage for one that never was, kPeerLost for one that is gone.
  WorkerInfo find(const Worker& worker) const;
  // Also of those that are gone; a made-up name for numbers that never were.
  WorkerInfo info(WorkerId id) const;
  bool present(WorkerId id) const;
  // Those that are there and listed, by number.
  std::vector<WorkerInfo> present() const;
  // Those that were listed and are gone, by number.
  std::vector<WorkerId> gone() const;
  // Why it is gone, as a failure.
  Failure lost(WorkerId id, const std::string& what) const;

 private:
  struct Entry {
    std::string name;
    std::uint64_t incarnation = 0;
    bool listed = false;
    std::optional<std::string> gone{};  // the cause
  };
  WorkerInfo find_name(const std::string& name) const LOCKSTEP_REQUIRES(mutex_);
  WorkerInfo find_id(int id) const LOCKSTEP_REQUIRES(mutex_);
  std::string names() const LOCKSTEP_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::map<WorkerId, Entry> entries_ LOCKSTEP_GUARDED_BY(mutex_);
  std::uint64_t n_incarnations_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

}  // namespace lockstep::rpc::internal
