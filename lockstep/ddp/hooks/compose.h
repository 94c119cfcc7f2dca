// Hooks made of hooks. A wrapper takes a hook and gives a hook, so wrappers nest:
//
//   auto hook = chain_hooks({fp16_compress_wrapper, clip}, allreduce_hook());   // fp16_compress_wrapper(clip(allreduce))
//
// where clip is a wrapper of your own, for example
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
  // On the thread that runs backward(), ahead of the inner hook, which sees the bucket as this leaves it: changed in
  // place, or with another buffer of as many elements. May be empty.
  std::function<void(GradBucket&)> before{};
  // Makes the final tensor of the inner hook's result and of the buffer as it was ahead of `before`. Runs on
  // "ls-completion" (or at once when the result is there already): must not block and must not communicate. May be empty.
  std::function<at::Tensor(const at::Tensor& result, const at::Tensor& buffer)> after{};
  std::string name{};  // the whole is called name(inner name)
};

// What either stage throws, backward() throws. Raises kUsage for an empty hook.
CommHook wrap_hook(CommHook hook, HookStages stages);
// The first wrapper is the outermost: it sees the bucket first and the result last.
CommHook chain_hooks(const std::vector<HookWrapper>& wrappers, CommHook hook);

// The inner hook sees the bucket cast to f16 or bf16, its result is cast back: wrapper(allreduce_hook()) is the
// compressing hook. A gradient beyond 65504 is infinite in f16; bf16 has the range of f32 and fewer digits. A bucket
// that has the type already is passed on as it is.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

}  // namespace lockstep
