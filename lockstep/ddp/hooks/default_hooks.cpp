#include "lockstep/ddp/hooks/default_hooks.h"

#include <utility>

#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/ddp/hooks/internal/bucket_scratch.h"

namespace lockstep {
namespace {

CommHook compressed(Group group, at::ScalarType dtype, const char* name) {
  group = internal::resolved(std::move(group));
  CommHook hook = internal::compress(allreduce_hook(group), dtype, group);
  hook.name = name;
  return hook;
}

}  // namespace

CommHook allreduce_hook(Group group) {
  return {.run = [group = internal::resolved(std::move(group))](
                     GradBucket& bucket) { return internal::average(bucket.buffer(), group); },
          .name = "allreduce_hook"};
}

CommHook fp16_compress_hook(Group group) {
  return compressed(std::move(group), at::kHalf, "fp16_compress_hook");
}

CommHook bf16_compress_hook(Group group) {
  return compressed(std::move(group), at::kBFloat16, "bf16_compress_hook");
}

CommHook noop_hook() {
  return {.run = [](GradBucket& bucket) { return ready_future(bucket.buffer()); }, .name = "noop_hook"};
}

}  // namespace lockstep
