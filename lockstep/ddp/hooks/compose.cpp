#include "lockstep/ddp/hooks/compose.h"

#include <memory>
#include <ranges>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/ddp/hooks/internal/bucket_scratch.h"
#include "lockstep/ddp/internal/hook_future.h"

namespace lockstep {

CommHook wrap_hook(CommHook hook, HookStages stages) {
  if (!hook.run)
    base::raise(ErrorKind::kUsage, base::cat("wrap_hook: ", stages.name, " is put around an empty hook"));
  CommHook wrapped;
  wrapped.name = stages.name.empty() ? hook.name : base::cat(stages.name, "(", hook.name, ")");
  wrapped.run = [hook = std::move(hook), stages = std::move(stages)](GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer();
    if (stages.before) stages.before(bucket);
    const at::Tensor seen = bucket.buffer();
    GradFuture inner = hook.run(bucket);
    bucket.set_buffer(buffer);  // a wrapper around this one finds what it left
    if (!inner)
      base::raise(ErrorKind::kUsage, base::cat("the communication hook ", hook.name, " returned no future"));
    if (!stages.after) return inner;
    return inner->then(
        [after = stages.after, name = hook.name, buffer, seen](c10::ivalue::Future& future) {
          internal::rethrow_error(future);
          return c10::IValue(after(internal::hook_result(future, name, seen), buffer));
        },
        c10::TensorType::get());
  };
  return wrapped;
}

CommHook chain_hooks(const std::vector<HookWrapper>& wrappers, CommHook hook) {
  for (const HookWrapper& wrapper : std::views::reverse(wrappers)) hook = wrapper(std::move(hook));
  return hook;
}

CommHook fp16_compress_wrapper(CommHook hook) {
  return internal::compress(std::move(hook), at::kHalf, {});
}

CommHook bf16_compress_wrapper(CommHook hook) {
  return internal::compress(std::move(hook), at::kBFloat16, {});
}

namespace internal {

CommHook compress(CommHook hook, at::ScalarType dtype, const Group& group) {
  auto scratch = std::make_shared<BucketScratch>(group);
  return wrap_hook(std::move(hook),
                   {.before =
                        [scratch, dtype](GradBucket& bucket) {
                          if (bucket.buffer().scalar_type() == dtype) return;
                          at::Tensor cast = scratch->get(bucket.index(), bucket.buffer(), dtype);
                          cast.copy_(bucket.buffer());
                          bucket.set_buffer(std::move(cast));
                        },
                    .after =
                        [](const at::Tensor& result, const at::Tensor& buffer) {
                          if (!result.is_same(buffer)) buffer.copy_(result.view_as(buffer));
                          return buffer;
                        },
                    .name = dtype == at::kHalf ? "fp16_compress_wrapper" : "bf16_compress_wrapper"});
}

}  // namespace internal
}  // namespace lockstep
