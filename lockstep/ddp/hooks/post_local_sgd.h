// Post-local SGD: gradients are averaged over the whole group for a while, then only inside a sub-group (the ranks of
// one host, as a rule) or not at all. From then on the models part ways unless something averages the parameters from
// time to time: a model averager.
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

// What the hook keeps between steps. One model each. Thread safety: none; backward() uses it.
class PostLocalSGDState {
 public:
  // Without a sub-group, and when one will be used, makes one per host: new_subgroups(), so that all members of
  // group must call, and the number of ranks per host must be known (LOCAL_WORLD_SIZE). Raises kUsage for a
  // negative start and for a group this rank is no member of.
  static std::shared_ptr<PostLocalSGDState> create(PostLocalSGDOptions options = {});

  const PostLocalSGDOptions& options() const { return options_; }  // groups filled in
  // Steps taken: backward passes that were reduced.
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
