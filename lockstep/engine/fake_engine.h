// The fake engine: one process stands for a rank of a world of any size. Nobody else is needed, nothing is sent, every
// operation is over at once and leaves its buffers as they are. For tracing, dry runs and tests.
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// Named "fake". Lives as long as the process.
const lockstep_engine* fake_engine() noexcept;

}  // namespace lockstep::comm
