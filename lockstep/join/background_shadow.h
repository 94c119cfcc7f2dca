// For layers whose forward and backward passes are collectives themselves, wherever a model calls them: SyncBatchNorm.
//
// A rank that has joined does not know when, in which order and how often the others come to such layers. So it asks:
// its background shadow, a thread with a group of its own, is told of each collective before it and participates with zeros.
// DistributedDataParallel finds the layers of its module and owns their background shadow: users see nothing of it.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

// Of all such layers of one model. May be used for one join() after the other.
class BackgroundShadow {
 public:
  BackgroundShadow() = default;
  // Ends the thread, at the cost of its group, when `finish` was not reached.
  virtual ~BackgroundShadow() = default;
  BackgroundShadow(const BackgroundShadow&) = delete;
  BackgroundShadow& operator=(const BackgroundShadow&) = delete;

  // From now on the layers announce what they do. On all ranks, before the body.
  virtual void enter() = 0;
  // This rank has no input left: from now on its thread keeps participating with zero contributions.
  virtual void shadow() = 0;
  // On all ranks, after all have called shadow(). Blocks until all are through; raises what the thread died of.
  virtual void finish() = 0;
};

// What such a layer derives from, beside torch::nn::Module.
class LayerWithCollectives {
 public:
  virtual ~LayerWithCollectives() = default;
  // A background shadow for `layers`, all of a model's that have the class of this one. Collective over `group`. Raises kUsage
  // when a layer communicates with other ranks than the group's.
  virtual std::unique_ptr<BackgroundShadow> make_background_shadow(
      const std::vector<LayerWithCollectives*>& layers, const Group& group) = 0;
};

}  // namespace lockstep
