// The GroupState of a group over an engine: the communicator and what it borrows. Shared tensors hold it,
// too. Thread safety: every method may be called from any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "lockstep/engine/engine.h"
#include "lockstep/group/detail/engine_host.h"
#include "lockstep/group/detail/group_factory.h"
#include "lockstep/group/detail/group_state.h"

namespace lockstep::internal {

class EngineGroupState final : public GroupState {
 public:
  // Joins the group: blocks until all ranks have, or raises.
  explicit EngineGroupState(EngineGroupOptions options);

  const GroupIdentity& identity() const override { return options_.identity; }
  bool calls_back() const override { return engine().capabilities().calls_back != 0; }
  Failure failure(lockstep_status status, std::string_view message) const override {
    return comm_->failure(status, message);
  }

  const comm::Engine& engine() const { return *options_.engine; }
  comm::Communicator& comm() { return *comm_; }
  const std::shared_ptr<comm::Communicator>& shared_comm() const { return comm_; }

 protected:
  void abort(const std::string& reason) override { comm_->abort(reason); }
  void leave(const std::string& cause) override { comm_->leave(cause); }

 private:
  std::shared_ptr<comm::Communicator> join() const;

  EngineGroupOptions options_;                      // constant after construction
  const std::unique_ptr<EngineHost> host_;          // before comm_, which borrows it
  const std::shared_ptr<comm::Communicator> comm_;  // synchronised by itself
};

}  // namespace lockstep::internal
