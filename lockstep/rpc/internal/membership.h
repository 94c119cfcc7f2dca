// How workers find each other, in the store: addresses by number for a static group, a list under a lock for
// a dynamic one. Thread safety: one call at a time.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/rpc/agent.h"
#include "lockstep/store/store.h"

namespace lockstep::rpc::internal {

// One worker as the others know it.
struct MemberRecord {
  std::uint16_t id = 0;
  std::string name;
  Bytes address;
  DeviceMaps device_maps;
  std::vector<int> devices;
};
auto lockstep_fields(SelfOf<MemberRecord> auto& self) {
  return fields({.name = "lockstep.rpc.Member", .version = 2}, self.id, self.name, self.address,
                self.device_maps, self.devices);
}

// Static: publishes this worker and learns of the others; returns when all know all. Raises kTimeout naming
// the ranks that have not come, kUsage when two have one name.
void join_static(Store& store, Agent& agent, int world_size, Deadline deadline);

// For a worker of a dynamic group that does not ask for a number: one that nobody ever had or asked for.
WorkerId take_number(Store& store);
// Not to be given by take_number any more.
void keep_number(Store& store, WorkerId number);
// For one that does. Raises kUsage when take_number gave it to another worker.
void claim_number(Store& store, WorkerId number);

// How long the workers of a dynamic group wait for each other. Tests are less patient.
struct Patience {
  Milliseconds lock{15'000};  // whoever holds the membership lock this long is considered lost
  Milliseconds tell{5000};    // and whoever does not acknowledge a change
};

// A worker's place in a dynamic group. Whoever joins or leaves does so under the membership lock, a key in
// the store: it writes the change there and waits until all others have acknowledged it, so that afterwards
// everyone knows it. With its acknowledgement a worker reports whom it knows to be lost; those, and others
// that do not acknowledge within seconds, are removed, by changes of their own. A name or number that is on
// the list may be of a worker that was killed. The newcomer asks: a worker that lives acknowledges the
// question; others ping it, and tell when it is lost. Thread: "ls-rpc-members", which waits in the store for
// changes; joined by leave() and the destructor.
class DynamicGroup {
 public:
  // Raises kUsage when the name or number is taken, kTimeout when others hold the lock for too long.
  static std::unique_ptr<DynamicGroup> join(const std::shared_ptr<Store>& store, std::shared_ptr<Agent> agent,
                                            Deadline deadline, Patience patience = {});
  ~DynamicGroup();
  DynamicGroup(const DynamicGroup&) = delete;
  DynamicGroup& operator=(const DynamicGroup&) = delete;

  void leave(Deadline deadline);

 private:
  DynamicGroup(const std::shared_ptr<Store>& store, std::shared_ptr<Agent> agent, std::uint64_t epoch,
               Patience patience);
  void watch(std::uint64_t epoch);
  // Applies and acknowledges change `epoch`. False: this worker was removed.
  bool note(std::uint64_t epoch);
  void stop();

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Store> watch_store_;
  const std::shared_ptr<Agent> agent_;
  const Patience patience_;
  std::atomic<bool> stopping_{false};
  base::Thread thread_;
};

}  // namespace lockstep::rpc::internal
