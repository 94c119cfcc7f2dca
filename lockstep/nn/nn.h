// Parts of models that know of several ranks or of memory: SyncBatchNorm, and checkpoint() to trade time for memory.
#pragma once

#include "lockstep/nn/checkpoint.h"
#include "lockstep/nn/sync_batch_norm.h"
