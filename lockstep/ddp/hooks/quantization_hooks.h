// Hooks that send eight bits per element. Thread safety: as comm_hook.h. Every rank r quantises its gradients
// g,
//   s = (max(g, 0) - min(g, 0)) / 255, at least 2^-23;  z = clamp(-round(min(g, 0) / s), 0, 255)
//   q = clamp(round(g / s) + z, 0, 255)
// all ranks get everyone's q, s and z in one all_gather, and each computes
//   g <- sum over r of s_r (q_r - z_r) / N
// Rounding is to nearest even. Gradients are quantised as f32, whatever their type. The error of one rank's
// element is at most s / 2. A row (below) with an infinity or a NaN becomes NaN on all ranks, so that loss
// scaling detects it. Each rank receives N times a quarter of the bytes: useful for few ranks and slow
// networks.
#pragma once

#include <cstdint>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/process_group.h"

namespace lockstep {

// One s and z for the whole bucket.
CommHook quantization_pertensor_hook(CommHookOptions options = {});

struct PerChannelOptions {
  Group group{};  // as in CommHookOptions
  std::int64_t bucket_size = 512;
};
// One s and z for each row of `bucket_size` elements, the last one padded with zeros: more accurate when
// gradients of one bucket differ in magnitude. Raises kUsage when it is not positive.
CommHook quantization_perchannel_hook(PerChannelOptions options = {});

}  // namespace lockstep
