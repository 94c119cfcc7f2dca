#include "lockstep/ddp/hooks/default_hooks.h"

#include <utility>

#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/ddp/hooks/internal/bucket_scratch.h"

namespace lockstep {
namespace {

CommHook compressed(CommHookOptions options, at::ScalarType dtype, const char* name) {
  options.group = internal::resolved(std::move(options.group));
  CommHook hook = internal::compress(allreduce_hook(options), dtype, options.group);
  hook.name = name;
  return hook;
}

}  // namespace

CommHook allreduce_hook(CommHookOptions options) {
  return {.run = [group = internal::resolved(std::move(options.group))](
                     GradBucket& bucket) { return internal::average(bucket.buffer(), group); },
          .name = "allreduce_hook"};
}

CommHook fp16_compress_hook(CommHookOptions options) {
  return compressed(std::move(options), at::kHalf, "fp16_compress_hook");
}

CommHook bf16_compress_hook(CommHookOptions options) {
  return compressed(std::move(options), at::kBFloat16, "bf16_compress_hook");
}

CommHook noop_hook() {
  return {.run = [](GradBucket& bucket) { return ready_future(bucket.buffer()); }, .name = "noop_hook"};
}

}  // namespace lockstep
