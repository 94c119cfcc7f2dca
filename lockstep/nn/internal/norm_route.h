// How the collectives of SyncBatchNorm layers travel, and how ranks without input take part in them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/group/process_group.h"
#include "lockstep/join/background_shadow.h"

namespace lockstep {
class SyncBatchNormImpl;
}

namespace lockstep::internal {

enum class Pass : std::uint8_t { kForward, kBackward };

// With an empty batch; block.
void shadow_forward(std::int64_t channels, const Group& group);
void shadow_backward(std::int64_t channels, const Group& group);

// Where a layer's collectives go. Under join() each is announced, in the group of the background shadows.
struct NormRoute {
  Group group;
  std::optional<int> announced_as{};  // number of the layer among the model's
  void announce(Pass pass) const;
};

class NormShadow final : public BackgroundShadow {
 public:
  // `layers` live as long as the model, which owns this. Collective over `group`.
  NormShadow(std::vector<SyncBatchNormImpl*> layers, const Group& group);
  ~NormShadow() override;
  void enter() override;
  void shadow() override;
  void finish() override;

 private:
  void run();

  const std::vector<SyncBatchNormImpl*> layers_;
  const std::vector<std::int64_t> channels_;  // by layer; what the thread needs of them
  const Group group_;                         // of the same ranks, for background shadows only
  std::optional<Failure> failure_;            // the thread's; read after it has ended
  base::Thread thread_;                       // last: joined first
};

}  // namespace lockstep::internal
