// The fake engine: one process stands for a rank of a world of any size. No other process is needed, nothing
// is sent, and every operation completes immediately and leaves its buffers unchanged. For tracing, dry runs
// and tests.
// Thread safety: every entry of the table may be called from any thread, within the rules of engine_abi.h.
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// Named "fake". Valid for the life of the process.
const lockstep_engine* fake_engine() noexcept;

}  // namespace lockstep::comm
