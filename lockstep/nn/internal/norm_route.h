// How the collectives of SyncBatchNorm layers travel, and how ranks without input take part in them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"
#include "lockstep/join/companion.h"

namespace lockstep {
class SyncBatchNormImpl;
}

namespace lockstep::internal {

enum class Pass : std::uint8_t { kForward, kBackward };

// With an empty batch; block.
void shadow_forward(std::int64_t channels, const Group& group);
void shadow_backward(std::int64_t channels, const Group& group);

// Where a layer's collectives go. Under join() each is announced, in the group of the companions.
struct NormRoute {
  Group group;
  std::optional<int> announced_as{};  // number of the layer among the model's
  void announce(Pass pass) const;
};

class NormCompanion final : public Companion {
 public:
  // `layers` live as long as the model, which owns this. Collective over `group`.
  NormCompanion(std::vector<SyncBatchNormImpl*> layers, const Group& group);
  ~NormCompanion() override;
  void enter() override;
  void keep_company() override;
  void finish() override;

 private:
  void run();

  const std::vector<SyncBatchNormImpl*> layers_;
  const std::vector<std::int64_t> channels_;  // by layer; what the thread needs of them
  const Group group_;                         // of the same ranks, for companions only
  std::optional<Failure> failure_;            // the thread's; read after it has ended
  base::Thread thread_;                       // last: joined first
};

}  // namespace lockstep::internal
