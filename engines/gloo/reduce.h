// The arithmetic of the plug-in: N inputs reduced in the order given, so that a result depends on nothing
// else and has the bits the built-in host engine gives. f16 and bf16 are accumulated in f32 and rounded once,
// to nearest even; min and max propagate NaN as torch does; integers wrap.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::gloo_plugin {

// AVG needs a floating type; BAND, BOR and BXOR an integer or bool.
bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op);

// Pre: can_reduce, at least one source; each source and `target` of `count` elements. The target may be one
// of the sources. AVG divides by the number of sources.
void reduce(lockstep_dtype dtype, lockstep_reduce_op op, std::span<const void* const> sources, void* target,
            std::size_t count);

}  // namespace lockstep::gloo_plugin
