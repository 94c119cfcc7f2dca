// An engine for CUDA memory that is as simple as can be: operations are copied to host memory, made there by the
// built-in engine, and copied back. The contract suite on device memory is tested with it, on the fake driver. Its order
// with streams is right, and can be made wrong on purpose, to see that the suite notices.
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::cuda {

// LOCKSTEP_STAGED_FAULT: reads_early (does not wait for op.stream), no_stream_wait (stream_wait does nothing), run_waits
// (run waits until the operation has completed), blocks_stream (post makes the stream wait), holds_streams (a failed
// operation does not release streams).
const lockstep_engine* staged_engine();

}  // namespace lockstep::cuda
