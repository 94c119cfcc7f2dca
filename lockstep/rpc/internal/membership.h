// How workers find each other, in the store: addresses by number for a static group, a list under a token for a dynamic one.
// Thread safety: one call at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/rpc/agent.h"
#include "lockstep/store/store.h"

namespace lockstep::rpc::internal {

// One worker as the others are told of it.
struct MemberRecord {
  std::uint16_t id = 0;
  std::string name;
  Bytes address;
};
auto lockstep_fields(SelfOf<MemberRecord> auto& self) {
  return fields({.name = "lockstep.rpc.Member", .version = 1}, self.id, self.name, self.address);
}

// Answers Kind::kMember: a worker joins or leaves.
class Members final : public Service {
 public:
  explicit Members(Agent& agent);
  void on_lost(WorkerId, const std::string&) override {}
  void debug_info(std::map<std::string, std::string>&) override {}

 private:
  void take(Request request);
  Agent& agent_;
};

// Static: publishes this worker and learns of the others; returns when all know all. Raises kTimeout naming the ranks that
// have not come, kUsage when two have one name.
void join_static(Store& store, Agent& agent, int world_size, Deadline deadline);

// Dynamic. Numbers are given by take_number when the worker does not ask for one.
WorkerId take_number(Store& store);
void join_dynamic(Store& store, Agent& agent, Deadline deadline);
void leave_dynamic(Store& store, Agent& agent, Deadline deadline);

}  // namespace lockstep::rpc::internal
