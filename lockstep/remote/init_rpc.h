// RPC with all that lockstep has above it.
//
//   init_rpc();                                 // "worker<rank>", by the launcher's environment
//   at::Tensor y = rpc::rpc_sync("worker1", rpc::op("aten::relu"), {x});
//   rpc::shutdown();
//
// rpc::init_rpc starts an agent that carries calls and RRefs. This one adds the layers above: distributed autograd;
// operators, libtorch's modules and optimizers as targets of calls. All workers of a job use the same one.
// Where the options are a variable, write lockstep::init_rpc: its type makes the compiler consider rpc::init_rpc too.
// Thread safety: as rpc::init_rpc.
#pragma once

#include <memory>
#include <string>

#include "lockstep/rpc/rpc.h"

namespace lockstep {

// As rpc::init_rpc; options.extensions come in addition.
void init_rpc(const std::string& name, rpc::RpcOptions options = {});
void init_rpc(rpc::RpcOptions options = {});

namespace rpc {
// Lets other workers call ATen operators here, and create libtorch's modules and optimizers: an entry of
// RpcOptions::extensions.
std::unique_ptr<Service> remote_extension(Agent& agent);
}  // namespace rpc

}  // namespace lockstep
