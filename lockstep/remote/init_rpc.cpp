#include "lockstep/remote/init_rpc.h"

#include <utility>

#include "lockstep/autograd/autograd.h"
#include "lockstep/remote/distributed_optimizer.h"
#include "lockstep/remote/operator.h"
#include "lockstep/remote/remote_module.h"

namespace lockstep {
namespace {

rpc::RpcOptions with_layers(rpc::RpcOptions options) {
  // Before the caller's own, which may build on them: extensions are called in this order, before the agent's
  // pool has a thread.
  options.extensions.insert(options.extensions.begin(), {autograd::extension, rpc::remote_extension});
  return options;
}

}  // namespace

void init_rpc(const std::string& name, rpc::RpcOptions options) {
  rpc::start(name, with_layers(std::move(options)));
}

void init_rpc(rpc::RpcOptions options) {
  rpc::start(with_layers(std::move(options)));
}

// Functions belong to the process, whatever its agents.
std::unique_ptr<rpc::Service> rpc::remote_extension(Agent&) {
  static const bool registered = register_function_source(internal::find_operator) &&
                                 internal::register_torch_modules() && internal::register_optimizers();
  (void)registered;
  return nullptr;
}

}  // namespace lockstep
