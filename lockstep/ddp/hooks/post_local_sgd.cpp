#include "lockstep/ddp/hooks/post_local_sgd.h"

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/group/groups.h"

namespace lockstep {

std::shared_ptr<PostLocalSGDState> PostLocalSGDState::create(PostLocalSGDOptions options) {
  if (options.start_localSGD_iter < 0) {
    base::raise(ErrorKind::kUsage,
                base::cat("PostLocalSGDState: start_localSGD_iter must not be negative, it is ",
                          options.start_localSGD_iter));
  }
  options.group = internal::resolved(std::move(options.group));
  const bool is_member = is_group_member(options.group);
  if (is_member && !options.subgroup && options.post_local_gradient_allreduce)
    options.subgroup = new_subgroups({}, {.group = options.group}).mine;
  if (!is_member || !is_group_member(options.subgroup)) {
    base::raise(
        ErrorKind::kUsage,
        "PostLocalSGDState: this rank is not a member of the group or the sub-group, so its gradients would "
        "be averaged "
        "with nobody's; give every rank a sub-group it is in");
  }
  return std::shared_ptr<PostLocalSGDState>(new PostLocalSGDState(std::move(options)));
}

GradFuture PostLocalSGDState::run(GradBucket& bucket) {
  const bool local = iter_ >= options_.start_localSGD_iter;
  if (bucket.is_last() && ++iter_ == options_.start_localSGD_iter)
    base::log(LogLevel::kInfo,
              base::cat("post_localSGD_hook: local SGD begins after ", iter_, " iterations"));
  if (local && !options_.post_local_gradient_allreduce) return ready_future(bucket.buffer());
  return internal::average(bucket.buffer(), local ? options_.subgroup : options_.group);
}

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state) {
  if (!state) base::raise(ErrorKind::kUsage, "post_localSGD_hook: the state is null");
  return {.run = [state = std::move(state)](GradBucket& bucket) { return state->run(bucket); },
          .name = "post_localSGD_hook"};
}

}  // namespace lockstep
