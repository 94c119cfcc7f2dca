// Starts RPC with all layers of lockstep above it.
//
//   init_rpc();                                 // "worker<rank>", by the launcher's environment
//   at::Tensor y = rpc::rpc_sync("worker1", rpc::op("aten::relu"), {x});
//   rpc::shutdown();
//
// rpc::start starts an agent that carries calls and RRefs. init_rpc adds the layers above: distributed
// autograd; operators, libtorch's modules and optimizers as targets of calls. All workers of a job call the
// same one of the two.
// Thread safety: as rpc::start.
#pragma once

#include <memory>
#include <string>

#include "lockstep/rpc/rpc.h"

namespace lockstep {

// As rpc::start; options.extensions come in addition. Without arguments, under the launcher or any other one
// that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, nothing else is needed.
void init_rpc(const std::string& name, rpc::RpcOptions options = {});
void init_rpc(rpc::RpcOptions options = {});

namespace rpc {
// Lets other workers call ATen operators here, and create libtorch's modules and optimizers: an entry of
// RpcOptions::extensions.
std::unique_ptr<Service> remote_extension(Agent& agent);
}  // namespace rpc

}  // namespace lockstep
