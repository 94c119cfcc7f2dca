// The arithmetic: one pass that loads N inputs, reduces them in the order given and stores the result to M
// outputs; and copies of large buffers. Vectorised with Highway, the instruction set chosen at run time.
//
// Guarantees: the order of operands is the order of `sources`, so a result depends on nothing else; f16 and
// bf16 are accumulated in f32 and rounded once, to nearest even; min and max propagate NaN as torch does. A
// target may be the same memory as a source (same element), but not overlap it shifted.
// Thread safety: functions without state; concurrent calls must not write to the same memory.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/engine/plugin.h"

namespace lockstep::comm {

// True when reduce() supports the pair. AVG needs a floating type; BAND, BOR and BXOR an integer or bool.
bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op);

// Pre: can_reduce(dtype, op), at least one source and one target, each of `count` elements. AVG divides by
// the number of sources.
void reduce(lockstep_dtype dtype, lockstep_reduce_op op, std::span<const void* const> sources,
            std::span<void* const> targets, std::size_t count);

// memcpy with stores that bypass the caches: the destination is not read first, which saves a third of the
// memory traffic. For copies too large to stay in a cache.
void stream_copy(void* to, const void* from, std::size_t n_bytes);
// The same for `n_rows` rows of `run` bytes, `to_pitch` and `from_pitch` bytes apart.
void stream_copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                      std::size_t run, std::size_t n_rows);

}  // namespace lockstep::comm
