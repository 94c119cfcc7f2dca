// A communicator of one of the two engines, and what its ranks are called in the whole group.
// Thread safety: constant after construction; the engine's calls may come from any thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"

namespace lockstep::comm::hierarchy {

// A failure as the reason of an abort, so that the ranks of a sub-communicator get its kind and the lost
// rank, not only its message. from_reason finds it again inside the message that the engine made of the
// reason; nothing when there is none.
std::string to_reason(const Failure& failure);
std::optional<Failure> from_reason(std::string_view text);

class SubCommunicator {
 public:
  // Which communicator of the same engine all members are in already, and their ranks there; null: none.
  struct Parent {
    lockstep_comm* comm = nullptr;
    std::vector<std::int32_t> ranks = {};
  };
  // Collective over `members`, ranks of the whole group in the sub-communicator's order. Its keys are below
  // `space` in the group's key-value space. Raises what the engine raises.
  SubCommunicator(const Engine& engine, const lockstep_comm_config& whole, std::string space,
                  std::vector<int> members, const Parent& parent);
  ~SubCommunicator();
  SubCommunicator(const SubCommunicator&) = delete;

  const lockstep_engine& table() const { return engine_.table(); }
  lockstep_comm* comm() const { return comm_; }
  const std::vector<int>& members() const { return members_; }
  int rank_of(int whole_rank) const;

  // The first failure, ranks as in the whole group; nothing while the sub-communicator is intact.
  std::optional<Failure> failure() const;
  // `message` of an operation that failed with `status`, as a failure of the whole group.
  Failure explain(lockstep_status status, std::string message) const;
  void abort(const Failure& failure) const;
  void leave(const char* cause) const;

 private:
  struct Space;

  const Engine& engine_;
  const std::string name_;
  const std::vector<int> members_;
  std::unique_ptr<Space> space_;
  lockstep_comm* comm_ = nullptr;
};

}  // namespace lockstep::comm::hierarchy
