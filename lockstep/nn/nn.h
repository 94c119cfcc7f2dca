// Modules for distributed and memory-constrained training: SyncBatchNorm, and checkpoint() to trade time for
// memory. Thread safety: stated in each header.
#pragma once

#include "lockstep/nn/checkpoint.h"
#include "lockstep/nn/sync_batch_norm.h"
