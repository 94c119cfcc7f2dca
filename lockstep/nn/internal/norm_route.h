// Which group the collectives of SyncBatchNorm layers use, and how ranks without input participate in them.
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

// Participate with an empty batch; block.
// `device` is the layer's, where the other ranks' batches are.
void shadow_forward(std::int64_t channels, const Group& group, c10::Device device);
void shadow_backward(std::int64_t channels, const Group& group, c10::Device device);

// The group of a layer's collectives. Under join() each is announced, in the group of the background shadows.
struct NormRoute {
  Group group;
  std::optional<int> announced_as{};  // index of the layer in the model
  void announce(Pass pass) const;
};

class NormShadow final : public BackgroundShadow {
 public:
  // `layers` belong to the model, which owns this. Collective over `group`.
  NormShadow(std::vector<SyncBatchNormImpl*> layers, const Group& group);
  ~NormShadow() override;
  void enter() override;
  void shadow() override;
  void finish() override;

 private:
  void run();

  const std::vector<SyncBatchNormImpl*> layers_;
  const std::vector<std::int64_t> channels_;  // per layer; all that the thread needs of them
  const Group group_;                         // same ranks, reserved for background shadows
  std::optional<Failure> failure_;            // set by the thread; read after joining it
  base::Thread thread_;                       // last: joined first
};

}  // namespace lockstep::internal
