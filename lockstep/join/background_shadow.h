// For layers whose forward and backward passes are collectives themselves, wherever a model calls them:
// SyncBatchNorm.
//
// A rank that has joined does not know when, in which order and how often the others reach such layers. Its
// background shadow, a thread with a group of its own, is therefore notified of each collective in advance
// and participates with zeros. DistributedDataParallel finds the layers of its module and owns their
// background shadow: users do not deal with it. Thread safety: one thread at a time: the one that runs
// join().
#pragma once

#include <memory>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

// For all such layers of one model. May be used for several join() calls, one after the other.
class BackgroundShadow {
 public:
  BackgroundShadow() = default;
  // Ends the thread, by aborting its group, when `finish` was not reached.
  virtual ~BackgroundShadow() = default;
  BackgroundShadow(const BackgroundShadow&) = delete;
  BackgroundShadow& operator=(const BackgroundShadow&) = delete;

  // From now on the layers announce their collectives. On all ranks, before the body.
  virtual void enter() = 0;
  // This rank has no input left: from now on its thread keeps participating with zero contributions.
  virtual void shadow() = 0;
  // On all ranks, after all have called shadow(). Blocks until all are done; raises the error that ended the
  // thread.
  virtual void finish() = 0;
};

// What such a layer derives from, beside torch::nn::Module.
class LayerWithCollectives {
 public:
  virtual ~LayerWithCollectives() = default;
  // A background shadow for `layers`, which are all layers of a model that have this one's class. Collective
  // over `group`. Raises kUsage when a layer communicates with ranks other than the group's.
  virtual std::unique_ptr<BackgroundShadow> make_background_shadow(
      const std::vector<LayerWithCollectives*>& layers, const Group& group) = 0;
};

}  // namespace lockstep
