// Post-local SGD: gradients are averaged over the whole group during a warm-up, then only inside a sub-group
// (typically the ranks of one host) or not at all. From then on parameters diverge unless a model averager
// averages them periodically.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/process_group.h"

namespace lockstep {

struct PostLocalSGDOptions {
  Group group{};     // null: the default group
  Group subgroup{};  // null: the ranks of this host among group's
  std::int64_t start_localSGD_iter = 0;
  bool post_local_gradient_allreduce = true;  // false: no averaging at all from then on
};

// The hook's state between steps, one per model. Thread safety: none; used by backward().
class PostLocalSGDState {
 public:
  // Without a sub-group, and when one will be used, makes one per host: new_subgroups(), so that all members
  // of group must call, and the number of ranks per host must be known (LOCAL_WORLD_SIZE). Raises kUsage for
  // a negative start and for a group this rank is not a member of.
  static std::shared_ptr<PostLocalSGDState> create(PostLocalSGDOptions options = {});

  const PostLocalSGDOptions& options() const { return options_; }  // groups filled in
  // Completed steps: reduced backward passes.
  std::int64_t iter() const { return iter_; }

 private:
  friend CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);
  explicit PostLocalSGDState(PostLocalSGDOptions options) : options_(std::move(options)) {}
  GradFuture run(GradBucket& bucket);

  const PostLocalSGDOptions options_;
  std::int64_t iter_ = 0;
};

// g <- mean over group while iter < start_localSGD_iter, then over the sub-group.
CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state);

}  // namespace lockstep
