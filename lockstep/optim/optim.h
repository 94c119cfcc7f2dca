// Optimizers for distributed training. Model averaging: average_parameters.h, model_averager.h and
// post_local_sgd_optimizer.h. Sharded state: zero_redundancy_optimizer.h; state as data: optimizer_state.h;
// by name: named_optimizer.h. Gradients as arguments: functional_optimizer.h. Steps inside backward:
// in_backward.h. Thread safety: stated in each header.
#pragma once

#include "lockstep/optim/average_parameters.h"
#include "lockstep/optim/functional_optimizer.h"
#include "lockstep/optim/in_backward.h"
#include "lockstep/optim/model_averager.h"
#include "lockstep/optim/named_optimizer.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/partition.h"
#include "lockstep/optim/post_local_sgd_optimizer.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"
