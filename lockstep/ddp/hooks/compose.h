// Hooks composed of hooks. A wrapper takes a hook and returns a hook, so wrappers nest. Thread safety: as
// comm_hook.h.
//
//   auto hook = chain_hooks({fp16_compress_wrapper, clip}, allreduce_hook());   // fp16_compress_wrapper(clip(allreduce))
//
// where clip is a custom wrapper, for example
//
//   CommHook clip(CommHook hook) {
//     return wrap_hook(std::move(hook), {.before = [](GradBucket& bucket) { bucket.buffer().clamp_(-1, 1); },
//                                        .name = "clip"});
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

using HookWrapper = std::function<CommHook(CommHook)>;

struct HookStages {
  // Runs on the thread that runs backward(), before the inner hook, which sees the bucket as modified here:
  // in place, or with another buffer of the same number of elements. May be empty.
  std::function<void(GradBucket&)> before{};
  // Computes the final tensor from the inner hook's result and the buffer as it was before `before`. Runs on
  // "ls-completion" (or immediately when the result is already available): must not block or communicate. May
  // be empty.
  std::function<at::Tensor(const at::Tensor& result, const at::Tensor& buffer)> after{};
  std::string name{};  // the composed hook is called name(inner name)
};

// backward() throws what either stage throws. Raises kUsage for an empty hook.
CommHook wrap_hook(CommHook hook, HookStages stages);
// The first wrapper is the outermost: it sees the bucket first and the result last.
CommHook chain_hooks(const std::vector<HookWrapper>& wrappers, CommHook hook);

// The inner hook sees the bucket cast to f16 or bf16, its result is cast back: wrapper(allreduce_hook()) is
// the compressing hook. A gradient beyond 65504 becomes infinite in f16; bf16 has the range of f32 with less
// precision. A bucket that already has the type is passed through.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

}  // namespace lockstep
