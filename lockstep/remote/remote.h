// Tensors, modules and optimizers on other workers.
//
//   init_rpc.h                starts RPC with everything here
//   operator.h                ATen operators as targets of calls: rpc_sync(to, op("aten::mm"), {a, b})
//   remote_module.h           a module that lives on another worker
//   distributed_optimizer.h   steps where the parameters are, with the gradients of an autograd context
//   remote_device.h           "worker1/cpu"
// Thread safety: as stated in each header that it includes.
#pragma once

#include "lockstep/remote/distributed_optimizer.h"
#include "lockstep/remote/init_rpc.h"
#include "lockstep/remote/operator.h"
#include "lockstep/remote/remote_device.h"
#include "lockstep/remote/remote_module.h"
